-- counter_evict.lua: evict counters of a bucket from the cache tier: those that were not used for long, or given ones.
--
-- KEYS     hc:{n}:c, :s, :d, :t, :j, :a
-- ARGV     how long a counter was not used, ms; maximum number of counters; prefix of the bucket's keys; then the keys of
--          given counters
-- Returns  how many counters were evicted; -1 if one of the given ones stays
-- Safe to repeat: counters that are not persisted yet stay. The script makes the keys that it deletes, in the bucket's
-- slot. O(counters).
--#include counter_steps.lua

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local named = #ARGV > 3
if redis.call('HEXISTS', KEYS[2], 'generation') == 0 then return 0 end
local old, gone = {unpack(ARGV, 4)}, 0
if not named then old = redis.call('ZRANGEBYSCORE', KEYS[6], '-inf', string.format('%.0f', now - ARGV[1]), 'LIMIT', 0, ARGV[2]) end
for _, key in ipairs(old) do
  if redis.call('HEXISTS', KEYS[3], key) + redis.call('HEXISTS', KEYS[4], key) == 0 then
    redis.call('ZREM', KEYS[6], key)
    redis.call('HDEL', KEYS[1], key)
    redis.call('UNLINK', ARGV[3] .. 'm:' .. key, ARGV[3] .. 'r:' .. key, ARGV[3] .. 'l:' .. key)
    dropSteps(ARGV[3] .. 'v:' .. key)
    gone = gone + 1
  end
end
if gone > 0 then redis.call('HINCRBY', KEYS[2], 'left', gone) end
return (not named or gone == #old) and gone or -1
