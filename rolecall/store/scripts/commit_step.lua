#!lua flags=allow-oom
-- Makes the sealed batch trained: the groups become terminal, step + 1. The rows stay for replay. ARGV: ctl, step, what the algorithm carries into the
-- next step ('' when nothing), then per trainer the digest of the batch it applied and its result (TrainResult): what was trained must be what was
-- sealed. Repeated: DONE.
local refusal = fenced(ARGV[1])
if refusal then return refusal end
local step, key, next_step = ARGV[2], batch_key(ARGV[2]), number(run, 'step', 0)
if tonumber(step) < next_step then return {'DONE'} end
if tonumber(step) > next_step then return {'ORDER', 'step ' .. next_step .. ' is next, not ' .. step} end
local gids = redis.call('HGET', key, 'gids')
if not gids then return {'MISSING', 'batch ' .. step .. ' is not sealed'} end
local digest, num_trained = redis.call('HGET', key, 'digest'), 0
for i = 4, #ARGV, 2 do
  if ARGV[i] ~= digest then return {'MISMATCH', 'batch ' .. step .. ' is sealed with digest ' .. digest .. ', a trainer applied ' .. ARGV[i]} end
end
for gid in string.gmatch(gids, '%S+') do
  redis.call('XDEL', trajectories, redis.call('HGET', group_key(gid), 'trajectory'))
  redis.call('ZREM', live, gid)
  redis.call('HSET', group_key(gid), 'state', 'trained')
  note(gid, 'trained', 'step', step, 'version', number(run, 'policy_version', -1))
  num_trained = num_trained + 1
end
for i = 4, #ARGV, 2 do redis.call('HSET', key, 'result:' .. (i - 4) / 2, ARGV[i + 1]) end
redis.call('HSET', key, 'trained', 1)
redis.call('HSETNX', key, 'numbers', '')
redis.call('HINCRBY', run, 'trained', num_trained)
redis.call('HINCRBY', run, 'step', 1)
redis.call('HSET', run, 'algorithm_state', ARGV[3])
return {'OK'}
