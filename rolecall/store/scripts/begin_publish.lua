#!lua flags=allow-oom
-- Revokes every attestation, before the first bucket moves: a claim needs begun_version = policy_version = the worker's. ARGV: ctl, version, step.
-- The version must be higher than any begun before; repeated for the same step before it is attested: DONE.
local refusal = fenced(ARGV[1])
if refusal then return refusal end
local version, begun = tonumber(ARGV[2]), number(run, 'begun_version', -1)
if version == begun and version > number(run, 'policy_version', -1) and tonumber(ARGV[3]) == number(run, 'begun_step', -1) then return {'DONE'} end
if version <= begun then return {'STALE', 'version ' .. version .. ' is not above ' .. begun .. ', which was begun before'} end
redis.call('HSET', run, 'begun_version', ARGV[2], 'begun_step', ARGV[3])
return {'OK'}
