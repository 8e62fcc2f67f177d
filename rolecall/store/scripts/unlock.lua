#!lua flags=allow-oom
-- Gives the run back, so that the next controller need not wait out the lease. ARGV: ctl.
local refusal = fenced(ARGV[1])
if refusal then return refusal end
redis.call('HSET', run, 'holder', '')
return {'OK'}
