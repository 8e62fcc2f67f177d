#!lua flags=no-writes,allow-oom
-- Pending entries, oldest first. ARGV: ctl (0: a reader), first id ('-', or '(' and the last one listed), most to list.
-- OK, the server's time in ms, then {entry, consumer, idle ms, delivery count} each.
local refusal = ARGV[1] ~= '0' and fenced(ARGV[1], true) or nil
if refusal then return refusal end
if redis.call('EXISTS', prompts) == 0 then return {'OK', now_ms(), {}} end
return {'OK', now_ms(), redis.call('XPENDING', prompts, 'rollout', ARGV[2], '+', ARGV[3])}
