#!lua flags=allow-oom
-- Sets the run back to a checkpoint that is not the store's own past: the ledger's keys are emptied, the rows they named become garbage, numbers that are
-- never reused stay. ARGV: ctl, number of the new lineage, step, next gid, highest policy version, epoch, cursor, trained, what the algorithm carries
-- into that step, the step evaluated last, then dropped:<reason> and count pairs. The lineage must be newer than the store's (which may have lost some); repeated: DONE. A store that knows fewer gids than the checkpoint,
-- or is marked as set back, also lost gids and epochs given out since, nobody knows how many: a million are passed over.
local refusal = fenced(ARGV[1])
if refusal then return refusal end
local lineage = number(run, 'lineage', 0)
if tonumber(ARGV[2]) == lineage then return {'DONE', number(run, 'lineage_gid', 0)} end
if tonumber(ARGV[2]) < lineage then return {'ORDER', 'lineage ' .. lineage .. ' has begun; ' .. ARGV[2] .. ' is older'} end

for _, gid in ipairs(redis.call('ZRANGE', live, 0, -1)) do
  local group = redis.call('HMGET', group_key(gid), 'state', 'trajectory')
  if group[1] ~= 'admitted' then redis.call('HSET', garbage, 'group:' .. gid, entry_fields(trajectories, group[2]).group) end
  redis.call('DEL', group_key(gid))
end
for step = number(run, 'freed_step', 0), number(run, 'step', 0) do free_batch(step) end
redis.call('DEL', prompts, trajectories, live, suspects, played)
redis.call('XGROUP', 'CREATE', prompts, 'rollout', '0', 'MKSTREAM')

local admitted = tonumber(ARGV[8])
for _, field in ipairs(redis.call('HKEYS', run)) do
  if string.sub(field, 1, 8) == 'dropped:' then redis.call('HDEL', run, field) end
end
for i = 11, #ARGV, 2 do
  redis.call('HSET', run, ARGV[i], ARGV[i + 1])
  admitted = admitted + tonumber(ARGV[i + 1])
end
local function highest(field, given) return math.max(number(run, field, -1), tonumber(given)) end
local first = tonumber(ARGV[4])
local lost = number(run, 'set_back', 0) == 1 or number(run, 'next_gid', 0) < first
first = math.max(number(run, 'next_gid', 0), first) + (lost and 1000000 or 0)
local version = math.max(highest('begun_version', ARGV[5]), number(run, 'policy_version', -1))
redis.call('HSET', run, 'lineage', ARGV[2], 'lineage_gid', first, 'next_gid', first, 'step', ARGV[3], 'freed_step', ARGV[3], 'published_step', -1,
  'begun_version', version + 1, 'begun_step', -1, 'epoch', highest('epoch', ARGV[6]) + (lost and 1000000 or 0), 'cursor', ARGV[7], 'trained', ARGV[8], 'admitted', admitted, 'algorithm_state', ARGV[9],
  'evaluated_step', ARGV[10], 'reported_step', ARGV[3])
redis.call('HDEL', run, 'set_back')
redis.call('XADD', history, '*', 'event', 'lineage', 'lineage', ARGV[2], 'step', ARGV[3], 'first_gid', first, 'trained', ARGV[8], unpack(ARGV, 11))
return {'OK', first}
