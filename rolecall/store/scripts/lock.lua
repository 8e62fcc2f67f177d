#!lua flags=allow-oom
-- Takes the run: ctl + 1. ARGV: ctl and beat as last seen, nonce of this attempt, a ctl that there was (0: none is known). Only if neither moved since
-- (compare and set), so that of two that waited for the same dead controller one wins. A store that knows less than that ctl was lost or set back, and
-- with it those after it, nobody knows how many: a million are passed over, for no role obeys a lower one. Repeated with its nonce: DONE. OK, the new ctl, the mark, and
-- the server, on which the ledger is confirmed: a new controller was told nothing yet that it could miss.
local ctl, beat, holder = redis.call('HGET', run, 'ctl') or '0', redis.call('HGET', run, 'beat') or '0', redis.call('HGET', run, 'holder')
if holder == ARGV[3] then return {'DONE', tonumber(ctl), number(run, 'mark', 0), redis.call('HGET', run, 'server')} end
if ctl ~= ARGV[1] or beat ~= ARGV[2] then return {'LOCKED', 'controller ' .. ctl .. ' is alive'} end
if redis.call('EXISTS', prompts) == 0 then redis.call('XGROUP', 'CREATE', prompts, 'rollout', '0', 'MKSTREAM') end
local known = tonumber(ARGV[4])
local here = server()
redis.call('HSET', run, 'holder', ARGV[3], 'server', here)
redis.call('HSETNX', run, 'id', string.sub(ARGV[3], 1, 16))
return {'OK', redis.call('HINCRBY', run, 'ctl', tonumber(ctl) < known and known - tonumber(ctl) + 1000000 or 1), redis.call('HINCRBY', run, 'mark', 1), here}
