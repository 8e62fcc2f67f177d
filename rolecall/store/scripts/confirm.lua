#!lua flags=allow-oom
-- Confirms the ledger on the server that answers: it was started again, a replica took over, or the slot was moved. ARGV: ctl, the highest mark that the
-- controller was told. A lower one here says that the store lost what it had acknowledged: the run is to go back to a checkpoint (set_back, until a lineage
-- begins). Repeated: the same again. OK, server, mark, '1' where the run is to go back.
local refusal = replaced(ARGV[1])
if refusal then return refusal end
local mark, here = number(run, 'mark', 0), server()
if mark < tonumber(ARGV[2]) then redis.call('HSET', run, 'set_back', 1) end
redis.call('HSET', run, 'server', here)
return {'OK', here, mark, redis.call('HGET', run, 'set_back') or '0'}
