#!lua flags=allow-oom
-- Takes unrenewed entries from living workers. ARGV: ctl, delivery limit, error, then {consumer, entry, delivery count, last renewal in ms of the server's
-- time} of each; one that was given back, claimed anew or renewed since (by more than the 20 ms that two readings of one renewal may be apart) is passed
-- over, so repeating does nothing. OK, {gid, last error} of what was delivered too often.
local refusal = fenced(ARGV[1])
if refusal then return refusal end
local in_hand = {}
for i = 4, #ARGV, 4 do in_hand[ARGV[i]] = in_hand[ARGV[i]] or num_held(ARGV[i]) end
for i = 4, #ARGV, 4 do
  local holder, count, idle_ms = owner(ARGV[i + 1])
  if holder == ARGV[i] and count == tonumber(ARGV[i + 2]) and now_ms() - idle_ms <= ARGV[i + 3] + 20 then
    hand_back('reaped', ARGV[i + 1], holder, count, in_hand[holder], tonumber(ARGV[2]), ARGV[3])
  end
end
return {'OK', overdelivered()}
