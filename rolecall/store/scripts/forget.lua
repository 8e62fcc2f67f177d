#!lua flags=allow-oom
-- Forgets garbage whose rows were deleted, or drained entries of a stream. ARGV: ctl, 'garbage' or a stream's name, then fields or entry ids.
local refusal = fenced(ARGV[1])
if refusal then return refusal end
local command = ARGV[2] == 'garbage' and 'HDEL' or 'XDEL'
for i = 3, #ARGV do redis.call(command, prefix .. ARGV[2], ARGV[i]) end
return {'OK'}
