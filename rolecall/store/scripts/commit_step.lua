#!lua flags=allow-oom
-- Makes the sealed batch trained: the groups become terminal, step + 1. The rows stay for replay. ARGV: ctl, step, then results (TrainResult).
-- Repeated: DONE.
local refusal = fenced(ARGV[1])
if refusal then return refusal end
local step, key, next_step = ARGV[2], batch_key(ARGV[2]), number(run, 'step', 0)
if tonumber(step) < next_step then return {'DONE'} end
if tonumber(step) > next_step then return {'ORDER', 'step ' .. next_step .. ' is next, not ' .. step} end
local gids = redis.call('HGET', key, 'gids')
if not gids then return {'MISSING', 'batch ' .. step .. ' is not sealed'} end
local num_trained = 0
for gid in string.gmatch(gids, '%S+') do
  redis.call('XDEL', trajectories, redis.call('HGET', group_key(gid), 'trajectory'))
  redis.call('ZREM', live, gid)
  redis.call('HSET', group_key(gid), 'state', 'trained')
  note(gid, 'trained', 'step', step)
  num_trained = num_trained + 1
end
for i = 3, #ARGV do redis.call('HSET', key, 'result:' .. (i - 3), ARGV[i]) end
redis.call('HSET', key, 'trained', 1)
redis.call('HINCRBY', run, 'trained', num_trained)
redis.call('HINCRBY', run, 'step', 1)
return {'OK'}
