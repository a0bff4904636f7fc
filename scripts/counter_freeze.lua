-- counter_freeze.lua: hold a bucket still, so that nothing changes while rows behind it are replaced.
--
-- KEYS[1]  hc:{n}:s
-- ARGV[1]  id of who freezes   ARGV[2]  freeze, hold or thaw   ARGV[3]  for how long, ms
-- Returns  1; 0 when it is frozen by somebody else, or, for hold and thaw, not frozen by ARGV[1] all the time
-- Safe to repeat and to arrive late: a freeze ends by itself. O(1).

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local held = redis.call('HMGET', KEYS[1], 'freeze', 'until')
local frozen = held[1] and now < tonumber(held[2])
local mine = frozen and held[1] == ARGV[1]
if ARGV[2] == 'freeze' and frozen and not mine or ARGV[2] ~= 'freeze' and not mine then return 0 end
if ARGV[2] == 'thaw' then
  redis.call('HDEL', KEYS[1], 'freeze', 'until')
else
  redis.call('HSET', KEYS[1], 'freeze', ARGV[1], 'until', string.format('%.0f', now + ARGV[3]))
end
return 1
