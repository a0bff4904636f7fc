-- hook_acknowledge.lua: remove the first events of the frozen batch of a webhook from its outbox.
-- Afterwards no batch is frozen.
--
-- KEYS[1]  hc:{w:HOOK}:q  list: events, oldest first
-- KEYS[2]  hc:{w:HOOK}:s  string: how many of the oldest are the frozen batch
-- ARGV[1]  the first event of the batch   ARGV[2]  how many are removed
-- Returns  1 if they were removed, else 0
-- Safe to repeat: by then, the outbox begins with another event.

local n = tonumber(redis.call('GET', KEYS[2]) or '0')
if n == 0 or redis.call('LRANGE', KEYS[1], 0, 0)[1] ~= ARGV[1] then
  return 0
end
redis.call('LTRIM', KEYS[1], math.min(n, tonumber(ARGV[2])), -1)
redis.call('UNLINK', KEYS[2])
return 1
