-- hook_take.lua: freeze the oldest events of a webhook as a batch, which stays the same until
-- hook_acknowledge.lua, and return it.
--
-- KEYS[1]  hc:{w:HOOK}:q  list: events, oldest first
-- KEYS[2]  hc:{w:HOOK}:s  string: how many of the oldest are the frozen batch
-- KEYS[3]  hc:{w:HOOK}:t  hash, whose expiry is renewed with the others
-- ARGV[1]  maximum number of events in a batch   ARGV[2]  expiry of the keys, s
-- Returns  the number of all events, and the events of the batch
-- Safe to repeat.

local waiting = redis.call('LLEN', KEYS[1])
local n = tonumber(redis.call('GET', KEYS[2]) or '0')
if n == 0 and waiting > 0 then
  n = math.min(waiting, tonumber(ARGV[1]))
  redis.call('SET', KEYS[2], n)
end
for _, key in ipairs(KEYS) do
  redis.call('EXPIRE', key, ARGV[2])
end
if n == 0 then
  return {0, {}}
end
return {waiting, redis.call('LRANGE', KEYS[1], 0, n - 1)}
