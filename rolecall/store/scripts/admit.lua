#!lua
-- Admits a group. ARGV: ctl, gid, group (PromptGroup), data cursor after it, traceparent, uid of its prompt, name of its
-- environment ('': none). gid below the next: DONE, so a lost reply
-- repeats nothing.
local refusal = fenced(ARGV[1])
if refusal then return refusal end
local gid, next_gid = ARGV[2], number(run, 'next_gid', 0)
if tonumber(gid) < next_gid then return {'DONE'} end
if tonumber(gid) > next_gid then return {'ORDER', 'group ' .. next_gid .. ' is the next to admit, not ' .. gid} end
local entry = redis.call('XADD', prompts, '*', 'gid', gid, 'group', ARGV[3], 'traceparent', ARGV[5])
redis.call('HSET', group_key(gid), 'state', 'admitted', 'entry', entry,
  'admit_published_step', number(run, 'published_step', -1))
if ARGV[7] ~= '' then redis.call('HSET', played, entry, ARGV[7]) end
redis.call('ZADD', live, gid, gid)
redis.call('HSET', run, 'cursor', ARGV[4])
redis.call('HINCRBY', run, 'next_gid', 1)
redis.call('HINCRBY', run, 'admitted', 1)
note(gid, 'admitted', 'prompt', ARGV[6], 'step', number(run, 'step', 0))
return {'OK'}
