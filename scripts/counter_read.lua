-- counter_read.lua: read counters, and whether a member is in them.
--
-- KEYS     three of each bucket: hc:{n}:c, hc:{n}:s, hc:{n}:k; then sets, named by their number
-- ARGV[1]  JSON: {"buckets":[{"at":1}],"keys":[{"key":…,"bucket":1,"set":4}],"member":hash or ""}
-- Returns  a list, per key: its state or "", its lock and the time or "", 1 when the member is in its set.
-- It writes nothing. O(keys).
--#include counter_set.lua

local call = cjson.decode(ARGV[1])
local clock = redis.call('TIME')
local now = string.format('%.0f', clock[1] * 1000 + math.floor(clock[2] / 1000))
local out = {}
for _, k in ipairs(call.keys) do
  local at = call.buckets[k.bucket].at
  local state, lock = redis.call('HGET', KEYS[at], k.key), redis.call('HGET', KEYS[at + 2], k.key)
  local mine = 0
  if call.member ~= '' and state and string.sub(state, 1, 8) == 'members ' then
    local _, _, found = place(openSet(KEYS[k.set]), call.member)
    mine = found and 1 or 0
  end
  out[#out + 1] = {state or '', lock and lock .. ' ' .. now or '', mine}
end
return out
