#!lua flags=allow-oom
-- A new epoch of the weight channel. ARGV: ctl. Repeated it skips a number, which harms nobody: epochs only need to grow.
local refusal = fenced(ARGV[1])
if refusal then return refusal end
return {'OK', redis.call('HINCRBY', run, 'epoch', 1)}
