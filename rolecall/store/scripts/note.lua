#!lua flags=allow-oom
-- Notes in the history what happened to groups outside the ledger (scored). ARGV: ctl, gids separated by spaces, event, then field and value pairs.
-- Repeated it is noted again, which harms nobody: no check counts such events.
local refusal = fenced(ARGV[1])
if refusal then return refusal end
for gid in string.gmatch(ARGV[2], '%S+') do note(gid, ARGV[3], unpack(ARGV, 4)) end
return {'OK'}
