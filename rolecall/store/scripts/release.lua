#!lua flags=allow-oom
-- A worker gives entries back. ARGV: consumer, event, '1' when the deliveries are excused (drain, pause, publish failure), delivery limit, error, then
-- (entry, delivery count) pairs. OK and how many were given back; those no longer held are passed over, so repeating does nothing.
local released = 0
for i = 6, #ARGV, 2 do
  if held(ARGV[i], ARGV[1], ARGV[i + 1]) then
    hand_back(ARGV[2], ARGV[i], ARGV[1], tonumber(ARGV[i + 1]), ARGV[3] == '1' and 'excused' or 'own', tonumber(ARGV[4]), ARGV[5])
    released = released + 1
  end
end
return {'OK', released}
