-- The ledger's keys and the few functions its scripts share; put before the body of every ledger script.
--
-- KEYS[1] is the prefix '{rl:<run>}:'. Everything below carries it, hence lies in one hash slot and one script may touch it all. KEYS[2] is `prompts`,
-- which is there, while a key named as the prefix alone never is: of two keys, of which it holds one, a node whose slot is being moved says TRYAGAIN. So no
-- script runs while some of the keys it does not name are on another node.
--
--   run            hash    ctl, holder, beat, lineage, lineage_gid, step, published_step, policy_version, begun_version, begun_step,
--                          epoch, next_gid, cursor, admitted, trained, dropped:<reason>, failed:<reason> (gids of the newest dead letters), freed_step, paused,
--                          algorithm_state, evaluated_step, reported_step, server (its replication id), mark (writes of controllers), set_back, id (no other ledger has it, also none of this
--                          run's name: delivery counts are compared within it)
--   prompts        stream  admitted groups, one entry each (gid, group, traceparent); consumer group `rollout`
--   trajectories   stream  committed groups, one entry each (gid, group); read by position, no consumer group
--   live           zset    gids not yet terminal, scored by gid
--   g:<gid>        hash    state (admitted, committed, sealed, trained), entry, trajectory, token, excused, deaths, error,
--                          admit_published_step, batch; deleted when the group is dropped, or its batch freed
--   suspects       hash    entry of prompts -> most groups a worker may hold while it holds this one: of groups whose worker died; until they end
--   played         hash    entry of prompts -> name of the environment that its group is played in; until they end
--   batch:<step>   hash    sealed batch: group (TrainBatch), digest, gids, trained, numbers, result:<i>; before that, begun: gids trainers were asked about
--   w:<consumer>   hash    version, digest, epoch of the attested weights; call and ids of the last claim
--   versions       hash    policy version -> '<step> <digest> <ctl>', attested ones only
--   rates          hash    prompt uid -> '<gid> <success rate>': the rate after that group; only with a curriculum
--   garbage        hash    'group:<gid>' or 'batch:<lineage>.<step>' -> message that names rows nobody reads any more, until they are deleted
--   dead, history  streams dead letters (gid, reason, error, last_error); transitions (gid, event and what belongs to it, see rolecall/store/history.py).
--                          The first half of an id is the server's time in milliseconds. Drained to files, then deleted
--
-- Delivery: at least once, committed once. A claim is a pending entry of the consumer group; its token, the fence, is (consumer, delivery
-- count). The count grows at each claim and never falls, so no two claims share a token; what a drain or a release took back is counted in
-- `excused`, what ended with its worker in `deaths`, and the rest are failures of the group itself. Released entries are pending under '~free', those that
-- are played in an environment under '~free:<its name>', and so are those for which it had no place when they were read from the stream, which is excused; entries
-- delivered too often wait under '~over' to be dropped. A group becomes terminal once: admitted = trained + dropped + live, XLEN(prompts) = groups in
-- state admitted, XLEN(trajectories) = committed + sealed.
--
-- Bounds: prompts, trajectories, live, suspects, played and g:* by the controller's admission; batch:* and garbage by its checkpoints (garbage of filtered groups as their rows are deleted); history and dead by how
-- often they are drained; w:* by the fleet; versions by the number of publishes; rates by the prompts of the data. Nothing is ever trimmed. When the server is full, what brings new
-- work in is refused (admit, and the staging of rows) and all else still runs (allow-oom), because only that frees memory again.
--
-- Answers: an array whose first element is OK, DONE (it had been done before) or the name of a refusal, whose second is for people.
-- Every check precedes the first write, because scripts do not roll back.

local prefix = KEYS[1]
local run, prompts, trajectories, live = prefix .. 'run', prefix .. 'prompts', prefix .. 'trajectories', prefix .. 'live'
local versions, garbage, dead, history = prefix .. 'versions', prefix .. 'garbage', prefix .. 'dead', prefix .. 'history'
local rates, suspects, played = prefix .. 'rates', prefix .. 'suspects', prefix .. 'played'
local FREE, OVER = '~free', '~over'

local function group_key(gid) return prefix .. 'g:' .. gid end

local function batch_key(step) return prefix .. 'batch:' .. step end

local function worker_key(consumer) return prefix .. 'w:' .. consumer end

local function number(key, field, default) return tonumber(redis.call('HGET', key, field) or default) end

-- The name that replication gives the server's data: another one at each start, when a replica takes over, and on another node of a cluster.
local function server() return string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)') or '' end

-- Answers a refusal when `ctl` is not the one in charge, else nil. A ctl above the store's is of a controller that the store has forgotten.
local function replaced(ctl)
  local held = number(run, 'ctl', 0)
  if tonumber(ctl) < held then return {'FENCED', 'controller ' .. ctl .. ' was replaced by ' .. held} end
  if tonumber(ctl) == held then return nil end
  if held == 0 then
    return {'ROLLED_BACK', 'the store was emptied: it holds nothing of this run any more. Somebody deleted its keys (FLUSHALL, DEL), or the server started '
      .. 'again without its append-only file; its log and its appendonly setting say which. Mend that, then go on with --resume from the last checkpoint'}
  end
  return {'ROLLED_BACK', 'the store was set back: it knows controller ' .. held .. ', this one is ' .. ctl .. '. It was restored from an older copy, or a '
    .. 'replica took over that lagged behind; go on with --resume, from the store where that is possible, else from the last checkpoint'}
end

-- Every script of a controller begins with it. Answers a refusal as `replaced`; or ELSEWHERE when the server is another than the one that the ledger was
-- last confirmed on: nothing is read or written here before `confirm` has compared marks. Else counts one more mark (not where `reads`, in scripts that write
-- nothing), which is the last but one element of the answer; the last is the server. Both are 0 and '' with a refusal. Whoever was told a mark
-- knows that the store had every write up to it.
local marked, serving = 0, ''
local function fenced(ctl, reads)
  local refusal, here = replaced(ctl), server()
  if refusal then return refusal end
  if redis.call('HGET', run, 'server') ~= here then return {'ELSEWHERE', 'the ledger was not confirmed on this server'} end
  marked, serving = reads and number(run, 'mark', 0) or redis.call('HINCRBY', run, 'mark', 1), here
end

-- The server's time in milliseconds, the same throughout a script (on Redis 7.0: nearly).
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Who holds a pending entry: consumer, delivery count and idle milliseconds, or false.
local function owner(entry)
  if redis.call('EXISTS', prompts) == 0 then return false, 0, 0 end
  local pending = redis.call('XPENDING', prompts, 'rollout', entry, entry, 1)
  if #pending == 0 then return false, 0, 0 end
  return pending[1][2], pending[1][4], pending[1][3]
end

-- The environment that an entry's group is played in; '': in none.
local function environment(entry) return redis.call('HGET', played, entry) or '' end

-- Who holds entries to be claimed that are played in the environment `name`: each kind waits by itself, so that a claim walks over none without places.
local function free_list(name) return name == '' and FREE or FREE .. ':' .. name end

-- The number of entries that `consumer` holds.
local function num_held(consumer)
  for _, of_consumer in ipairs(redis.call('XPENDING', prompts, 'rollout')[4] or {}) do
    if of_consumer[1] == consumer then return tonumber(of_consumer[2]) end
  end
  return 0
end

local function held(entry, consumer, count)
  local holder, delivery = owner(entry)
  return holder == consumer and delivery == tonumber(count)
end

-- The fields of a stream entry by name, or nil.
local function entry_fields(stream, entry)
  local found = redis.call('XRANGE', stream, entry, entry)
  if #found == 0 then return nil end
  local flat, fields = found[1][2], {}
  for i = 1, #flat, 2 do fields[flat[i]] = flat[i + 1] end
  return fields
end

local function note(gid, event, ...) redis.call('XADD', history, '*', 'gid', gid, 'event', event, ...) end

-- Hands an entry that `consumer` holds back: to its free list, or to '~over' when it failed too often. `event` says how it came to that, `error` what happened
-- ('' when nothing is known); the last error that is known stays with the group. `fault` says whose it was:
--   nobody's   'excused': the delivery does not count
--   the group's   'own': too often is `limit` times (0: no limit)
--   anybody's   a number: the worker died or fell silent with so many groups in hand. Which one did it, if any, is found by handing out quarters: each
--               may next be held beside a quarter as many. Too often is more than `limit` times, the last time alone
local function hand_back(event, entry, consumer, count, fault, limit, error)
  local gid = entry_fields(prompts, entry).gid
  local key, over = group_key(gid), false
  if error ~= '' then redis.call('HSET', key, 'error', consumer .. ': ' .. error) end
  if fault == 'excused' then
    redis.call('HINCRBY', key, 'excused', 1)
  elseif fault == 'own' then
    over = limit > 0 and count - number(key, 'excused', 0) - number(key, 'deaths', 0) >= limit
  else
    redis.call('HSET', suspects, entry, math.ceil(fault / 4))
    over = redis.call('HINCRBY', key, 'deaths', 1) > limit and limit > 0 and fault == 1
  end
  redis.call('XCLAIM', prompts, 'rollout', over and OVER or free_list(environment(entry)), 0, entry, 'JUSTID')
  note(gid, event, 'token', consumer .. '-' .. count, 'excused', fault == 'excused' and 1 or 0, 'held_back', over and 1 or 0, 'error', error)
end

-- {gid, last error} of each entry that was delivered too often and waits to be dropped.
local function overdelivered()
  local found = {}
  for _, pending in ipairs(redis.call('XPENDING', prompts, 'rollout', '-', '+', 1000, OVER)) do
    local gid = entry_fields(prompts, pending[1]).gid
    found[#found + 1] = {gid, redis.call('HGET', group_key(gid), 'error') or ''}
  end
  return found
end

-- Forgets a sealed batch and its groups; its rows become garbage.
local function free_batch(step)
  local key = batch_key(step)
  local message = redis.call('HGET', key, 'group')
  if not message then
    redis.call('DEL', key)
    return
  end
  redis.call('HSET', garbage, 'batch:' .. number(run, 'lineage', 0) .. '.' .. step, message)
  for gid in string.gmatch(redis.call('HGET', key, 'gids'), '%S+') do redis.call('DEL', group_key(gid)) end
  redis.call('DEL', key)
end

