#!lua flags=allow-oom
-- Keeps the success rate of a prompt. ARGV: ctl, uid, group it was last changed by, rate. An older group than the one kept changes nothing: DONE.
local refusal = fenced(ARGV[1])
if refusal then return refusal end
local kept = redis.call('HGET', rates, ARGV[2])
if kept and tonumber(string.match(kept, '^%d+')) >= tonumber(ARGV[3]) then return {'DONE'} end
redis.call('HSET', rates, ARGV[2], ARGV[3] .. ' ' .. ARGV[4])
return {'OK'}
