#!lua flags=allow-oom
-- Gives entries back (drain, pause, publish failure); the delivery is excused. ARGV: consumer, then (entry, delivery count) pairs. OK and how many
-- were given back; those no longer held are passed over, so repeating does nothing.
local released = 0
for i = 2, #ARGV, 2 do
  if held(ARGV[i], ARGV[1], ARGV[i + 1]) then
    hand_back(ARGV[i], tonumber(ARGV[i + 1]), true, 0)
    released = released + 1
  end
end
return {'OK', released}
