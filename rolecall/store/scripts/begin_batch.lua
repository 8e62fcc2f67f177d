#!lua flags=allow-oom
-- Remembers which groups trainers are asked about before they are sealed as the next batch: what they answer is written once, from the weights of that
-- step, so these groups belong into it. ARGV: ctl, step, then the gids. Repeated: the last stands.
local refusal = fenced(ARGV[1])
if refusal then return refusal end
local step = number(run, 'step', 0)
if tonumber(ARGV[2]) ~= step then return {'ORDER', 'step ' .. step .. ' is next, not ' .. ARGV[2]} end
redis.call('HSET', batch_key(ARGV[2]), 'begun', table.concat(ARGV, ' ', 3))
return {'OK'}
