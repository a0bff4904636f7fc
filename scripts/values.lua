-- values.lua: read the newest updates of topics of one bucket, for kinds whose updates are
-- stored as they are published. If the caller names a gateway, attach it to the topics.
--
-- KEYS[1]  {b}:s  hash, see README.md   KEYS[2]  {b}:e  set of endpoints: gateway, a
--          zero byte, topic
-- KEYS[3…] hashes; a field of each has the update
-- ARGV[1]  channel   ARGV[2]  PUBLISH or SPUBLISH   ARGV[3]  gateway; empty: only read
-- ARGV[4]  the field   ARGV[5…]  the topics of KEYS[3…]
-- Returns  {'0'; the bucket's generation, or ''; then 'incarnation sequence value' per topic, or ''
--          if it has no update}. The '0' says, as in the reply of read.lua, that nothing is stale.
-- Safe to repeat: only a new endpoint is published. O(topics).
--#include publish.lua
--#include void.lua

local state = redis.call('HMGET', KEYS[1], 'generation', 'void')
local reply, records = {'0', state[1] or ''}, {}
for k = 3, #KEYS do
  local inc, rest = string.match(redis.call('HGET', KEYS[k], ARGV[4]) or '', '^(%d+)( .*)$')
  reply[k] = inc and incarnationOf(inc, state[2]) .. rest or ''
end
local gateway = ARGV[3]
if gateway ~= '' then
  redis.call('SCARD', KEYS[2])
  for k = 3, #KEYS do attach(KEYS[2], gateway, ARGV[k + 2], records) end
  if #records > 0 then publish(KEYS[1], ARGV[1], ARGV[2], false, false, '', records) end
end
return reply
