#!lua flags=allow-oom
-- Makes a live group terminal without training it. ARGV: ctl, gid, reason, error. An error text makes it a dead letter too, beside the last error of
-- its workers and among the newest FAILURES of its reason. Its rows, if it was committed, become garbage. DONE when it is terminal already; a sealed group is refused.
local FAILURES = 1000
local refusal = fenced(ARGV[1])
if refusal then return refusal end
local gid, key = ARGV[2], group_key(ARGV[2])
local state = redis.call('HGET', key, 'state')
if not state or state == 'dropped' or state == 'trained' then
  if tonumber(gid) >= number(run, 'next_gid', 0) then return {'MISSING', 'group ' .. gid .. ' was never admitted'} end
  return {'DONE'}
end
if state == 'sealed' then return {'STATE', 'group ' .. gid .. ' is sealed into batch ' .. redis.call('HGET', key, 'batch')} end
local last_error = redis.call('HGET', key, 'error') or ''
if state == 'admitted' then
  local entry = redis.call('HGET', key, 'entry')
  redis.call('XACK', prompts, 'rollout', entry)
  redis.call('XDEL', prompts, entry)
  redis.call('HDEL', suspects, entry)
  redis.call('HDEL', played, entry)
else
  local trajectory = redis.call('HGET', key, 'trajectory')
  redis.call('HSET', garbage, 'group:' .. gid, entry_fields(trajectories, trajectory).group)
  redis.call('XDEL', trajectories, trajectory)
end
redis.call('ZREM', live, gid)
redis.call('DEL', key)
redis.call('HINCRBY', run, 'dropped:' .. ARGV[3], 1)
if ARGV[4] ~= '' then
  redis.call('XADD', dead, '*', 'gid', gid, 'reason', ARGV[3], 'error', ARGV[4], 'last_error', last_error)
  local failed = (redis.call('HGET', run, 'failed:' .. ARGV[3]) or '') .. gid .. ' '
  if select(2, string.gsub(failed, ' ', '')) > FAILURES then failed = string.gsub(failed, '^%S+ ', '') end
  redis.call('HSET', run, 'failed:' .. ARGV[3], failed)
end
note(gid, 'dropped', 'reason', ARGV[3], 'error', ARGV[4], 'last_error', last_error)
return {'OK'}
