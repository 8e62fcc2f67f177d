#!lua flags=allow-oom
-- Takes an unrenewed entry from a living worker. ARGV: ctl, consumer, entry, delivery limit, '1' when the delivery is excused, error.
-- OK, 1 if the consumer held it, {gid, last error} of what was delivered too often.
local refusal = fenced(ARGV[1])
if refusal then return refusal end
local holder, count = owner(ARGV[3])
if holder == ARGV[2] then hand_back('reaped', ARGV[3], holder, count, ARGV[5] == '1', tonumber(ARGV[4]), ARGV[6]) end
return {'OK', holder == ARGV[2] and 1 or 0, overdelivered()}
