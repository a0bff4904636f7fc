-- counter_read.lua: read counters, and whether a member is in them.
--
-- KEYS     two of each bucket: hc:{n}:c, hc:{n}:s, in front six; then sets, named by their number
-- ARGV[1]  JSON: {"buckets":[{"at":1}],"keys":[{"key":…,"bucket":1,"set":3}],"member":hash or "","touch":ms}
--          touch: PostgreSQL stands behind Redis, and who is read is young again, when it has not been for so long
-- Returns  a list, per key: its state or "", 1 when the member is in its set;
--          in front then the bucket's generation. Or "lost".
-- It writes ages alone. O(keys).
--#include counter_set.lua
--#include counter_front.lua

local call = cjson.decode(ARGV[1])
local clock = redis.call('TIME')
local millis = clock[1] * 1000 + math.floor(clock[2] / 1000)
local out = {}
if call.touch then
  for _, b in ipairs(call.buckets) do
    b.front = front(KEYS[b.at + 1])
    if not b.front then return 'lost' end
  end
end
for _, k in ipairs(call.keys) do
  local b = call.buckets[k.bucket]
  local state = redis.call('HGET', KEYS[b.at], k.key)
  local mine = 0
  if call.member ~= '' and state and string.match(state, '^members ') then
    local _, _, found = place(openSet(KEYS[k.set]), call.member)
    mine = found and 1 or 0
  end
  out[#out + 1] = {state or '', mine, b.front and string.format('%.0f', b.front.generation)}
  if call.touch and state and state ~= '-' and tonumber(redis.call('ZSCORE', KEYS[b.at + 5], k.key) or 0) < millis - call.touch then
    redis.call('ZADD', KEYS[b.at + 5], millis, k.key)
  end
end
return out
