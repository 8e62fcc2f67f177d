#!lua flags=allow-oom
-- The digests were equal: these workers hold the version and may claim. ARGV: ctl, version, step, digest, then consumers. Also for a worker that
-- received the current version later. Repeated: the same again.
local refusal = fenced(ARGV[1])
if refusal then return refusal end
local version, step, digest = ARGV[2], ARGV[3], ARGV[4]
if version ~= redis.call('HGET', run, 'begun_version') then
  return {'STALE', 'version ' .. version .. ' is not ' .. (redis.call('HGET', run, 'begun_version') or 'any') .. ', the one last begun'}
end
if step ~= redis.call('HGET', run, 'begun_step') then
  return {'ORDER', 'version ' .. version .. ' was begun for step ' .. redis.call('HGET', run, 'begun_step') .. ', not ' .. step}
end
local known = redis.call('HGET', versions, version)
if known and string.match(known, '^%S+ (%S+)') ~= digest then
  return {'DIGEST', 'version ' .. version .. ' was attested as ' .. known .. ', not with digest ' .. digest}
end
if not known then redis.call('HSET', versions, version, step .. ' ' .. digest .. ' ' .. ARGV[1]) end
local epoch = number(run, 'epoch', 0)
for i = 5, #ARGV do redis.call('HSET', worker_key(ARGV[i]), 'version', version, 'digest', digest, 'epoch', epoch) end
redis.call('HSET', run, 'policy_version', version, 'published_step', step)
return {'OK'}
