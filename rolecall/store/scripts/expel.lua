#!lua flags=allow-oom
-- A worker is dead or left behind: its attestation is revoked and its entries are handed back; the consumer is deleted after, because deleting it
-- first would drop them. ARGV: ctl, consumer, delivery limit, '1' when the deliveries are excused, error.
-- OK, entries handed back, {gid, last error} of what was delivered too often.
local refusal = fenced(ARGV[1])
if refusal then return refusal end
redis.call('DEL', worker_key(ARGV[2]))
local returned, fault = 0, ARGV[4] == '1' and 'excused' or num_held(ARGV[2])
repeat
  local pending = redis.call('XPENDING', prompts, 'rollout', '-', '+', 1000, ARGV[2])
  for _, item in ipairs(pending) do
    hand_back('expelled', item[1], ARGV[2], item[4], fault, tonumber(ARGV[3]), ARGV[5])
    returned = returned + 1
  end
until #pending < 1000
redis.call('XGROUP', 'DELCONSUMER', prompts, 'rollout', ARGV[2])
return {'OK', returned, overdelivered()}
