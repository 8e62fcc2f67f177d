#!lua flags=allow-oom
-- Notes that the numbers of all steps before this many were told, so that a controller that starts again tells no other ones. ARGV: ctl, steps. Repeated: the
-- same again.
local refusal = fenced(ARGV[1])
if refusal then return refusal end
redis.call('HSET', run, 'reported_step', ARGV[2])
return {'OK'}
