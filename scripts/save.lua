-- save.lua: save the follows of one user, and publish the new version, unless another call
-- has changed them since the caller read them. A call that changes nothing gets a new version,
-- too, and publishes nothing: a call that read the follows before and arrives later is refused.
--
-- KEYS[1]  {b}:s  hash, see README.md
-- KEYS[2]  {b}:u:<user>  hash, see README.md
-- ARGV[1]  channel   ARGV[2]  PUBLISH or SPUBLISH   ARGV[3]  topic
-- ARGV[4]  'incarnation sequence' that was read; '0 0': there was none
-- ARGV[5]  updated   ARGV[6]  seconds a record without follows is kept
-- ARGV[7]  number of follows to set; then page, follow, page, follow, …
-- then     pages that the user no longer follows
-- Returns  the new 'incarnation sequence', or empty if the version was not ARGV[4].
-- Safe to repeat: the second call finds another version. O(follows given).
--#include publish.lua
--#include void.lua

local inc, seq, updated = string.match(redis.call('HGET', KEYS[2], '') or '0 0 0', '^(%d+) (%d+) (%d*)')
local void = redis.call('HGET', KEYS[1], 'void')
if inc ~= '0' then inc = incarnationOf(inc, void) end
if inc .. ' ' .. seq ~= ARGV[4] then return '' end
if inc == '0' then
  local time = redis.call('TIME')
  inc = incarnationOf(string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000)), void)
end
seq = string.format('%.0f', seq + 1)
local sets, gone = {'', inc .. ' ' .. seq .. ' ' .. ARGV[5]}, {}
local from = 8 + 2 * ARGV[7]
for i = 8, from - 1 do sets[#sets + 1] = ARGV[i] end
for i = from, #ARGV do gone[#gone + 1] = ARGV[i] end
if #gone > 0 then redis.call('HDEL', KEYS[2], unpack(gone)) end
redis.call('HSET', KEYS[2], unpack(sets))
-- One field is the version alone: such a record is forgotten after a while.
if redis.call('HLEN', KEYS[2]) > 1 then
  redis.call('PERSIST', KEYS[2])
else
  redis.call('EXPIRE', KEYS[2], ARGV[6])
end
if #sets > 2 or #gone > 0 or updated ~= ARGV[5] then
  publish(KEYS[1], ARGV[1], ARGV[2], false, false, '', {updateRecord(ARGV[3], inc, seq, ARGV[5])})
end
return inc .. ' ' .. seq
