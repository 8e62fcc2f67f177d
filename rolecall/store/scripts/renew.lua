#!lua flags=allow-oom
-- Resets the idle time of the entries being worked on. ARGV: consumer, then (entry, delivery count) pairs. OK and which pairs are lost, from 0.
local lost = {}
for i = 2, #ARGV, 2 do
  if held(ARGV[i], ARGV[1], ARGV[i + 1]) then
    redis.call('XCLAIM', prompts, 'rollout', ARGV[1], 0, ARGV[i], 'JUSTID')
  else
    lost[#lost + 1] = (i - 2) / 2
  end
end
return {'OK', lost}
