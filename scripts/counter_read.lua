-- counter_read.lua: read counters, and whether a member is in them.
--
-- KEYS     for each bucket hc:{n}:c and :s, in front also :d, :t, :j and :a; then sets
-- ARGV     hash of the member or ""; in front, after how many ms a read notes the use of a counter again, otherwise 0; then
--          for each counter its key, and the indexes of its bucket's first key and of its set
-- Returns  for each counter a list: its state or "", 1 if the member is in its set; in front also the bucket's generation.
--          Or "lost"
-- It writes times of use only, and not at every read. O(keys).
--#include counter_set.lua
--#include counter_front.lua

local member, touch = ARGV[1], tonumber(ARGV[2])
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local fronts, out = {}, {}
for i = 3, #ARGV, 3 do
  local key, bucket = ARGV[i], tonumber(ARGV[i + 1])
  local f = fronts[bucket]
  if touch > 0 and not f then
    f = front(KEYS[bucket + 1])
    if not f then return 'lost' end
    fronts[bucket] = f
  end
  local state = redis.call('HGET', KEYS[bucket], key)
  local mine = 0
  if member ~= '' and state and string.match(state, '^members ') then
    local _, _, found = place(openSet(KEYS[tonumber(ARGV[i + 2])]), member)
    mine = found and 1 or 0
  end
  out[#out + 1] = {state or '', mine, f and string.format('%.0f', f.generation)}
  if f and state and state ~= '-' and tonumber(redis.call('ZSCORE', KEYS[bucket + 5], key) or 0) < now - touch then
    redis.call('ZADD', KEYS[bucket + 5], now, key)
  end
end
return out
