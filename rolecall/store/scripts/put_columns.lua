#!lua flags=allow-oom
-- Writes columns, once each. KEYS: rows of one shard. ARGV: per row, number of fields, then field and value of each. A row that is gone refuses the
-- whole call before anything is written (a late scorer must not bring a dropped row back); a field that is there stays as it is.
-- OK and how many rows had all of their fields before; or MISSING and the first missing key.
if redis.call('EXISTS', unpack(KEYS)) < #KEYS then
  for _, key in ipairs(KEYS) do
    if redis.call('EXISTS', key) == 0 then return {'MISSING', key} end
  end
end
local at, already = 1, 0
for _, key in ipairs(KEYS) do
  local num_fields, num_new = tonumber(ARGV[at]), 0
  for i = at + 1, at + 2 * num_fields, 2 do num_new = num_new + redis.call('HSETNX', key, ARGV[i], ARGV[i + 1]) end
  if num_new == 0 then already = already + 1 end
  at = at + 2 * num_fields + 1
end
return {'OK', already}
