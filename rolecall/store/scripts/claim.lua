#!lua flags=allow-oom
-- Claims up to n groups: released entries first, then new ones. ARGV: consumer, n, number of the call, then (environments, number)
-- pairs: at most so many are of groups that are played in one of those, their names with commas between ('': in none). DENIED unless the consumer is attested at the
-- current policy version and no publish is under way; and on a server that the controller has not confirmed yet, which may lack what is claimed or trained
-- already. Repeated with the number of the consumer's last claim: the same entries, as far as it still holds
-- them. With a lower one (it was on its way while the network was away): nothing, for nobody waits for the answer.
-- An entry whose worker died may be poison: while a worker holds it, it gets no more than `suspects` says in all. (Otherwise one poison prompt takes the
-- deliveries of every group beside it.) Waiting for a worker that holds so few ends, because admission does.
-- An entry whose environment has no more places is passed over. One that came from the stream is released for it, excused: whoever has a place takes it, and
-- it keeps nobody from what was admitted behind it. What an earlier release let wait with all others is put where its kind waits. A call releases at most
-- MOST_PASSED so: the server answers nobody else meanwhile, and the backlog of an environment that is away may be thousands.
-- OK, last entry id delivered to anyone, then per entry {entry, delivery count, excused, most groups to hold (0: any number), group, traceparent};
-- the ledger's id; 0 where no group was left waiting for a place (also of a repeated call), 1 where some was, 2 where there may be more to claim behind those
-- that this call released.
local MOST_PASSED = 200
local consumer, worker = ARGV[1], worker_key(ARGV[1])
local version, current = redis.call('HGET', worker, 'version'), redis.call('HGET', run, 'policy_version')
if not version then return {'DENIED', consumer .. ' holds no attested weights'} end
if version ~= current or redis.call('HGET', run, 'begun_version') ~= current then
  return {'DENIED', consumer .. ' is attested at version ' .. version .. ', which is no longer the current one'}
end
if redis.call('HGET', run, 'server') ~= server() or redis.call('HGET', run, 'set_back') == '1' then
  return {'DENIED', 'the controller has not confirmed the ledger on this server yet'}
end

local places = {}
for i = 4, #ARGV, 2 do
  local shared = {left = tonumber(ARGV[i + 1])}
  for name in string.gmatch(ARGV[i] .. ',', '([^,]*),') do places[name] = shared end
end
local function has_place(name) return not places[name] or places[name].left > 0 end
-- Whether there is a place in the environment `name`, which is taken with that.
local function takes_place(name)
  if not has_place(name) then return false end
  if places[name] then places[name].left = places[name].left - 1 end
  return true
end

local function before(entry, other)
  local ms, seq = string.match(entry, '(%d+)-(%d+)')
  local other_ms, other_seq = string.match(other, '(%d+)-(%d+)')
  return tonumber(ms) < tonumber(other_ms) or ms == other_ms and tonumber(seq) < tonumber(other_seq)
end

local entries, latest, passed, num_passed = {}, number(worker, 'call', -1), 0, 0
-- Lets an entry wait for a place in the environment `name`.
local function pass_over(name, entry)
  redis.call('XCLAIM', prompts, 'rollout', free_list(name), 0, entry, 'JUSTID')
  num_passed = num_passed + 1
  passed = num_passed < MOST_PASSED and 1 or 2
end

if tonumber(ARGV[3]) == latest then
  for entry in string.gmatch(redis.call('HGET', worker, 'ids'), '%S+') do
    if owner(entry) == consumer then entries[#entries + 1] = entry end
  end
elseif tonumber(ARGV[3]) > latest then
  -- Bounds are looked up one by one: after a loss of many workers there are thousands, and everybody asks.
  local limit, any = tonumber(ARGV[2]), redis.call('EXISTS', suspects) == 1
  local function bound(entry, most) return any and math.min(most, number(suspects, entry, most)) or most end
  local mine, most = redis.call('XPENDING', prompts, 'rollout', '-', '+', 10000, consumer), math.huge
  for _, pending in ipairs(mine) do most = bound(pending[1], most) end
  -- Lists of what waits, one for each kind that has a place, each with its oldest entry. How many others wait does not matter.
  local lists = {}
  local function turn(list, from)
    list.entry = (redis.call('XPENDING', prompts, 'rollout', from, '+', 1, list.consumer)[1] or {})[1]
  end
  for _, waiting in ipairs(redis.call('XPENDING', prompts, 'rollout')[4] or {}) do
    local name = string.match(waiting[1], '^' .. FREE .. ':?(.*)')
    if name and not has_place(name) then
      passed = 1
    elseif name then
      lists[#lists + 1] = {consumer = waiting[1]}
      turn(lists[#lists], '-')
    end
  end
  while #entries < limit and #mine + #entries < most and num_passed < MOST_PASSED do
    local list
    for _, other in ipairs(lists) do
      if other.entry and (not list or before(other.entry, list.entry)) then list = other end
    end
    if not list then break end
    local entry = list.entry
    local with_it = bound(entry, most)
    turn(list, '(' .. entry)
    if #mine + #entries < with_it then
      local name = environment(entry)
      if takes_place(name) then
        redis.call('XCLAIM', prompts, 'rollout', consumer, 0, entry)
        entries[#entries + 1] = entry
        most = with_it
      elseif name ~= '' and list.consumer == free_list(name) then
        list.entry = nil
      elseif name ~= '' then
        pass_over(name, entry)
      else
        passed = 1
      end
    end
  end
  limit = math.min(limit, most - #mine)
  while #entries < limit and num_passed < MOST_PASSED do
    local count = math.min(limit - #entries, MOST_PASSED - num_passed)
    local fresh = redis.call('XREADGROUP', 'GROUP', 'rollout', consumer, 'COUNT', count, 'STREAMS', prompts, '>')
    if not fresh then break end
    for _, item in ipairs(fresh[1][2]) do
      local name = environment(item[1])
      if takes_place(name) then
        entries[#entries + 1] = item[1]
      else
        redis.call('HINCRBY', group_key(item[2][2]), 'excused', 1)
        pass_over(name, item[1])
      end
    end
  end
  redis.call('HSET', worker, 'call', ARGV[3], 'ids', table.concat(entries, ' '))
end

local claims = {}
for _, entry in ipairs(entries) do
  local _, count = owner(entry)
  local fields = entry_fields(prompts, entry)
  claims[#claims + 1] = {entry, count, number(group_key(fields.gid), 'excused', 0), number(suspects, entry, 0), fields.group, fields.traceparent}
  if tonumber(ARGV[3]) > latest then note(fields.gid, 'claimed', 'token', consumer .. '-' .. count) end
end
local info, last = redis.call('XINFO', 'GROUPS', prompts), '0-0'
for _, described in ipairs(info) do
  for i = 1, #described, 2 do
    if described[i] == 'last-delivered-id' then last = described[i + 1] end
  end
end
return {'OK', last, claims, redis.call('HGET', run, 'id') or '', passed}
