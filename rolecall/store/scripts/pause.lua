#!lua flags=allow-oom
-- Notes whether people paused the run, so that a controller that starts again knows. ARGV: ctl, 1 or 0. Repeated: the same again.
local refusal = fenced(ARGV[1])
if refusal then return refusal end
redis.call('HSET', run, 'paused', ARGV[2])
return {'OK'}
