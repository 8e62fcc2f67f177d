#!lua flags=allow-oom
-- Notes that the evaluation of the weights after a step was recorded, so that a controller that starts again does not repeat it. ARGV: ctl, step. Repeated:
-- the same again.
local refusal = fenced(ARGV[1])
if refusal then return refusal end
redis.call('HSET', run, 'evaluated_step', ARGV[2])
return {'OK'}
