#!lua flags=allow-oom
-- Fixes a train batch before Train. ARGV: ctl, step, batch (TrainBatch), digest, then in order its gids, each with the tokens of its rows (history.py). All
-- committed, else ORDER: a commit that the controller saw was lost since, and it is to look again. Step the next; repeated with the same digest: DONE.
local refusal = fenced(ARGV[1])
if refusal then return refusal end
local step, key = ARGV[2], batch_key(ARGV[2])
local digest = redis.call('HGET', key, 'digest')
if digest == ARGV[4] then return {'DONE'} end
if digest then return {'MISMATCH', 'batch ' .. step .. ' is sealed with digest ' .. digest .. ', not ' .. ARGV[4]} end
if tonumber(step) ~= number(run, 'step', 0) then return {'ORDER', 'step ' .. number(run, 'step', 0) .. ' is next, not ' .. step} end
local gids, seen, tokens = {}, {}, {}
for i = 5, #ARGV, 2 do
  local gid = ARGV[i]
  local state = redis.call('HGET', group_key(gid), 'state')
  if seen[gid] then return {'STATE', 'group ' .. gid .. ' is in the batch twice'} end
  if state ~= 'committed' then return {'ORDER', 'group ' .. gid .. ' is ' .. (state or 'not live') .. ', not committed'} end
  seen[gid] = true
  tokens[gid] = ARGV[i + 1]
  gids[#gids + 1] = gid
end
redis.call('HSET', key, 'group', ARGV[3], 'digest', ARGV[4], 'gids', table.concat(gids, ' '))
for _, gid in ipairs(gids) do
  redis.call('HSET', group_key(gid), 'state', 'sealed', 'batch', step)
  note(gid, 'sealed', 'step', step, 'tokens', tokens[gid])
end
return {'OK'}
