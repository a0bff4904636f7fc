-- detach.lua: remove a gateway's endpoints from topics of one bucket.
--
-- KEYS[1]  {b}:s  hash, see README.md   KEYS[2]  {b}:e  set of endpoints, see values.lua
-- ARGV[1]  channel   ARGV[2]  PUBLISH or SPUBLISH   ARGV[3]  gateway   ARGV[4…]  topics
-- Returns  how many of the endpoints existed.
-- Safe to repeat: only an endpoint that existed is published. O(topics).
--#include publish.lua

local gateway, records = ARGV[3], {}
redis.call('HLEN', KEYS[1]) -- with foreign data the script fails here, before it writes
for i = 4, #ARGV do
  if redis.call('SREM', KEYS[2], gateway .. '\0' .. ARGV[i]) == 1 then
    records[#records + 1] = endpointRecord('-', ARGV[i], gateway)
  end
end
if #records > 0 then publish(KEYS[1], ARGV[1], ARGV[2], false, false, '', records) end
return #records
