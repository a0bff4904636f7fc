-- counter_freeze.lua: freeze a bucket, so that no counter changes while its rows in PostgreSQL are replaced.
--
-- KEYS[1]  hc:{n}:s
-- ARGV[1]  id of the caller   ARGV[2]  freeze, hold (extend) or thaw   ARGV[3]  for how long, ms
-- Returns  1; 0: another caller has frozen the bucket, or for hold and thaw, the freeze of ARGV[1] has ended
-- Safe to repeat and to arrive late, because a freeze expires. O(1).

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
