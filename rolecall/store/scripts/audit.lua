#!lua flags=no-writes,allow-oom
-- Everything that an audit compares, at one instant. Takes no arguments in ARGV. OK, run, last id of the history, prompts and trajectories as {entry, gid},
-- last entry delivered, pending entries, consumers among their owners that hold no attestation, live groups as {gid, state, entry,
-- trajectory, batch}, unfreed batches as {step, gids, trained}.
local function ids_of(stream)
  local found = {}
  if redis.call('EXISTS', stream) == 1 then
    for _, item in ipairs(redis.call('XRANGE', stream, '-', '+')) do
      for i = 1, #item[2], 2 do
        if item[2][i] == 'gid' then found[#found + 1] = {item[1], item[2][i + 1]} end
      end
    end
  end
  return found
end

local function info(kind, stream, field)
  if redis.call('EXISTS', stream) == 0 then return '0-0' end
  local described = redis.call('XINFO', kind, stream)
  if kind == 'GROUPS' then described = described[1] end
  for i = 1, #described, 2 do
    if described[i] == field then return described[i + 1] end
  end
end

local pending, strangers, asked = {}, {}, {}
if redis.call('EXISTS', prompts) == 1 then pending = redis.call('XPENDING', prompts, 'rollout', '-', '+', 1000000) end
for _, item in ipairs(pending) do
  if not asked[item[2]] and string.sub(item[2], 1, 1) ~= '~' and redis.call('HEXISTS', worker_key(item[2]), 'version') == 0 then strangers[#strangers + 1] = item[2] end
  asked[item[2]] = true
end
local groups, batches = {}, {}
for _, gid in ipairs(redis.call('ZRANGE', live, 0, -1)) do
  local fields = redis.call('HMGET', group_key(gid), 'state', 'entry', 'trajectory', 'batch')
  for i = 1, 4 do fields[i] = fields[i] or '' end
  groups[#groups + 1] = {gid, unpack(fields)}
end
for step = number(run, 'freed_step', 0), number(run, 'step', 0) do
  local fields = redis.call('HMGET', batch_key(step), 'gids', 'trained')
  if fields[1] then batches[#batches + 1] = {step, fields[1], fields[2] or ''} end
end
return {'OK', redis.call('HGETALL', run), info('STREAM', history, 'last-generated-id'), ids_of(prompts), ids_of(trajectories),
  info('GROUPS', prompts, 'last-delivered-id'), pending, strangers, groups, batches}
