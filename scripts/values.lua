-- values.lua: read the updates of topics of one bucket that are kept as they are
-- published and, for a gateway, attach it to them.
--
-- KEYS[1]  {b}:s  hash, see README.md   KEYS[2]  {b}:e  set of endpoints: gateway, a
--          zero byte, topic
-- KEYS[3…] hashes; a field of each has the update
-- ARGV[1]  channel   ARGV[2]  PUBLISH or SPUBLISH   ARGV[3]  gateway; empty: only read
-- ARGV[4]  the field   ARGV[5…]  the topics of KEYS[3…]
-- Returns  {'0', 'incarnation sequence value' per topic, or '' when there is none};
--          '0' as read.lua says it: nothing of this is ever stale.
-- Safe to repeat: an endpoint that is already there is not published again. O(topics).
--#include publish.lua

local reply, records = {'0'}, {}
for k = 3, #KEYS do reply[k - 1] = redis.call('HGET', KEYS[k], ARGV[4]) or '' end
local gateway = ARGV[3]
if gateway ~= '' then
  redis.call('HLEN', KEYS[1]) -- foreign data fails here, before any write
  redis.call('SCARD', KEYS[2])
  for k = 3, #KEYS do attach(KEYS[2], gateway, ARGV[k + 2], records) end
  if #records > 0 then publish(KEYS[1], ARGV[1], ARGV[2], false, false, records) end
end
return reply
