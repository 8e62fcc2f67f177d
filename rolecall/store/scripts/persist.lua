#!lua flags=allow-oom
-- Lifts the expiry of rows whose group was committed. KEYS: rows of one shard. OK, or MISSING and the first missing key; nothing is written then.
if redis.call('EXISTS', unpack(KEYS)) < #KEYS then
  for _, key in ipairs(KEYS) do
    if redis.call('EXISTS', key) == 0 then return {'MISSING', key} end
  end
end
for _, key in ipairs(KEYS) do redis.call('PERSIST', key) end
return {'OK'}
