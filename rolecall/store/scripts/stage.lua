#!lua
-- Writes whole rows with an expiry, under their attempt's own token. KEYS: rows of one shard. ARGV: seconds to live, then per row, number of fields
-- and field and value of each. Repeated: the same again.
local at = 2
for _, key in ipairs(KEYS) do
  local num_fields = tonumber(ARGV[at])
  redis.call('HSET', key, unpack(ARGV, at + 1, at + 2 * num_fields))
  redis.call('EXPIRE', key, ARGV[1])
  at = at + 2 * num_fields + 1
end
return {'OK'}
