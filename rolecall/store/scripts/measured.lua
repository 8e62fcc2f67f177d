#!lua flags=allow-oom
-- Notes the numbers of a sealed batch, for whoever reports its step. ARGV: ctl, step, numbers (TrainResult). Repeated: the same again.
local refusal = fenced(ARGV[1])
if refusal then return refusal end
local key = batch_key(ARGV[2])
if redis.call('HEXISTS', key, 'digest') == 0 then return {'MISSING', 'batch ' .. ARGV[2] .. ' is not sealed'} end
redis.call('HSET', key, 'numbers', ARGV[3])
return {'OK'}
