#!lua flags=allow-oom
-- Commits a sampled group, once. ARGV: entry, consumer, delivery count, gid, group (CommittedGroup), its tokens (history.py), then (version,
-- digest) pairs of its spans.
-- Repeated with its token: DONE. Never refused for length or memory: admission is its bound, and it frees the prompt.
local entry, consumer, count, gid = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local key, token = group_key(gid), consumer .. '-' .. count
if redis.call('HGET', key, 'token') == token then return {'DONE'} end
if not held(entry, consumer, count) or redis.call('HGET', key, 'entry') ~= entry then
  return {'LOST', 'group ' .. gid .. ' is no longer held under ' .. token}
end
for i = 7, #ARGV, 2 do
  local known = redis.call('HGET', versions, ARGV[i])
  if not known or string.match(known, '^%S+ (%S+)') ~= ARGV[i + 1] then
    return {'UNATTESTED', 'group ' .. gid .. ' holds tokens of version ' .. ARGV[i] .. ' under a digest that was never attested'}
  end
end
-- Before all else that is written: users of the store that an earlier release made may not do it.
redis.call('HDEL', played, entry)
local trajectory = redis.call('XADD', trajectories, '*', 'gid', gid, 'group', ARGV[5])
redis.call('HSET', key, 'state', 'committed', 'token', token, 'trajectory', trajectory)
redis.call('XACK', prompts, 'rollout', entry)
redis.call('XDEL', prompts, entry)
redis.call('HDEL', suspects, entry)
local spans = {}
for i = 7, #ARGV, 2 do spans[#spans + 1] = ARGV[i] end
note(gid, 'committed', 'token', token, 'versions', table.concat(spans, ' '), 'tokens', ARGV[6])
return {'OK'}
