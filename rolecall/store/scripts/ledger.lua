#!lua flags=no-writes,allow-oom
-- One consistent snapshot. ARGV: ctl (0: a reader without the run), 'groups' to list the live groups too.
-- OK, run, XLEN(prompts), XLEN(trajectories), ZCARD(live), {consumer, pending} pairs, then per live group {gid, state, entry, admit_published_step}.
local refusal = ARGV[1] ~= '0' and fenced(ARGV[1], true) or nil
if refusal then return refusal end
local pending = {}
if redis.call('EXISTS', prompts) == 1 then pending = redis.call('XPENDING', prompts, 'rollout')[4] or {} end
local groups = {}
if ARGV[2] == 'groups' then
  for _, gid in ipairs(redis.call('ZRANGE', live, 0, -1)) do
    local fields = redis.call('HMGET', group_key(gid), 'state', 'entry', 'admit_published_step')
    table.insert(fields, 1, gid)
    groups[#groups + 1] = fields
  end
end
return {'OK', redis.call('HGETALL', run), redis.call('XLEN', prompts), redis.call('XLEN', trajectories), redis.call('ZCARD', live), pending, groups}
