#!lua flags=allow-oom
-- Forgets the batches below a step that every trainer's committed checkpoint covers; their rows become garbage. ARGV: ctl, step.
-- OK, then field and message of all garbage, also of what earlier calls left; it stays until forget.
local refusal = fenced(ARGV[1])
if refusal then return refusal end
local upto = tonumber(ARGV[2])
if upto > number(run, 'step', 0) then return {'ORDER', 'steps below ' .. upto .. ' are not all trained; ' .. number(run, 'step', 0) .. ' is next'} end
for step = number(run, 'freed_step', 0), upto - 1 do free_batch(step) end
if upto > number(run, 'freed_step', 0) then redis.call('HSET', run, 'freed_step', upto) end
return {'OK', redis.call('HGETALL', garbage)}
