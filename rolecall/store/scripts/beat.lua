#!lua flags=allow-oom
-- The controller's heartbeat: a counter, which others watch on their own clocks. ARGV: ctl.
local refusal = fenced(ARGV[1])
if refusal then return refusal end
return {'OK', redis.call('HINCRBY', run, 'beat', 1)}
