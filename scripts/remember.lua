-- remember.lua: write ended minutes of pages of one bucket.
--
-- KEYS[1…n] {b}:x:<page>  strings: 14 bytes per minute in which the count changed: the minute
--           (4; since the Unix epoch), the greatest count (5), the last count (5)
-- KEYS[n+1…] {b}:y:<hour>:<page>  hashes: minute (4 bytes) and writer -> arrivals and their
--           registers, see minutes.AppendVisits
-- ARGV[1]  expiry of the keys, seconds   ARGV[2]  how many bytes of a string are kept
-- ARGV[3]  n   then per string the bytes to append, then per hash a field and a value
-- Returns  1.
-- Safe to repeat: a reader treats two copies of a minute as one. A string is cut only when it
-- is a quarter longer than ARGV[2], so that it is cut rarely. O(minutes).
local seconds, most, n = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
for k = 1, #KEYS do -- with foreign data the script fails here, before it writes
  if k <= n then redis.call('STRLEN', KEYS[k]) else redis.call('HLEN', KEYS[k]) end
end
for k = 1, n do
  if redis.call('APPEND', KEYS[k], ARGV[3 + k]) > most + most / 4 then
    redis.call('SET', KEYS[k], redis.call('GETRANGE', KEYS[k], -most, -1))
  end
  redis.call('EXPIRE', KEYS[k], seconds)
end
for k = n + 1, #KEYS do
  redis.call('HSET', KEYS[k], ARGV[2 * k - n + 2], ARGV[2 * k - n + 3])
  redis.call('EXPIRE', KEYS[k], seconds)
end
return 1
