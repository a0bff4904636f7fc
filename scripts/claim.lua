-- claim.lua: claim one partition. From then on, writes under its older epochs are refused.
--
-- KEYS[1]  {p}:o  hash: the owner of the partition, see README.md
-- KEYS[2]  {p}:d  string: pages whose new count may not be written yet, see README.md
-- ARGV[1]  owner   ARGV[2]  generation   ARGV[3]  id of the calling process
-- ARGV[4]  number of this claim among the process's claims; it grows   ARGV[5]  the epoch of
--          the process's former claim of the partition; 0: there was none
-- ARGV[6]  1: that claim is made again after a loss of data
-- Returns  {epoch, bytes in KEYS[2], the former epoch or 0, number of shards, members,
--          1 if the partition has all its members (members.lua)}. The epoch is -1 if
--          the call is late: the process has claimed the partition again since. With ARGV[6]
--          it is 0 if another process has a newer claim than ARGV[5] and so stays the owner.
-- Safe to repeat: a claim with the same number gets the same epoch, and a claim with a
-- lower number does nothing. Under a new generation all counts of pages are void, so no
-- count needs a correction, and the script deletes KEYS[2]. O(1).

local old = redis.call('HMGET', KEYS[1], 'epoch', 'generation', 'claimant', 'claim', 'former', 'shares', 'members',
  'whole')
local whole = old[8] == ARGV[2] and 1 or 0
local pages = redis.call('STRLEN', KEYS[2])
local former, shards, members = tonumber(old[1] or 0) or 0, tonumber(old[6] or 1), tonumber(old[7] or 0)
-- The same process: the numbers of its claims tell a repetition from a call that is late.
if old[1] and old[3] == ARGV[3] then
  local n = tonumber(old[4])
  if n == tonumber(ARGV[4]) then return {former, pages, tonumber(old[5] or 0), shards, members, whole} end
  if n > tonumber(ARGV[4]) then return {-1, pages, 0, shards, members, 0} end
elseif old[1] and ARGV[6] == '1' and former > tonumber(ARGV[5]) then
  return {0, pages, 0, shards, members, 0}
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
-- A time, so that the next owner learns how long this one had the partition. It never falls, also where Redis has lost
-- the former claim and the clock has gone back: the process, and the buckets on other masters, remember that claim.
local epoch = math.max(now, former + 1, ARGV[5] + 1)
if old[2] ~= ARGV[2] and pages > 0 then
  redis.call('UNLINK', KEYS[2])
  pages = 0
end
redis.call('HSET', KEYS[1], 'epoch', string.format('%.0f', epoch), 'owner', ARGV[1], 'generation', ARGV[2],
  'sequence', '0', 'batch', '0',
  'claimant', ARGV[3], 'claim', ARGV[4], 'former', old[1] or '0')
return {epoch, pages, former, shards, members, whole}
