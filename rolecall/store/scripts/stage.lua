#!lua
-- Writes whole rows with an expiry, under their attempt's own token. KEYS: rows of one shard. ARGV: seconds to live, then per row, number of fields
-- and field and value of each. Repeated: the same again; a row whose expiry was lifted is left alone, or a repetition that the network kept would expire it.
local at = 2
for _, key in ipairs(KEYS) do
  local num_fields = tonumber(ARGV[at])
  if redis.call('TTL', key) ~= -1 then
    redis.call('HSET', key, unpack(ARGV, at + 1, at + 2 * num_fields))
    redis.call('EXPIRE', key, ARGV[1])
  end
  at = at + 2 * num_fields + 1
end
return {'OK'}
