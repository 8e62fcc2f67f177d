#!lua flags=no-writes,allow-oom
-- Entries in workers' hands. ARGV: ctl (0: a reader), most entries to list. OK, then {entry, consumer, idle ms, delivery count} each, oldest first.
local refusal = ARGV[1] ~= '0' and fenced(ARGV[1]) or nil
if refusal then return refusal end
if redis.call('EXISTS', prompts) == 0 then return {'OK', {}} end
return {'OK', redis.call('XPENDING', prompts, 'rollout', '-', '+', ARGV[2])}
