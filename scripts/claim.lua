-- claim.lua: take one partition; all older epochs of it are fenced here from now on.
--
-- KEYS[1]  {p}:o  hash: e epoch, o owner, g generation, s and i sequence and batch
--                 last applied, c who claimed and n its number of the claim, f the
--                 epoch before
-- KEYS[2]  {p}:d  set: pages whose count may not have been written
-- ARGV[1]  owner   ARGV[2]  generation   ARGV[3]  id of the calling process
-- ARGV[4]  the process's number of this claim; it grows
-- Returns  {epoch, number of pages in KEYS[2], the epoch before or 0}; epoch '' when
--          this process has claimed the partition again since: the call came late.
-- Safe to repeat: a claim of the same number gets the same epoch, one of a lower
-- number does nothing. Under another generation all counts of pages are void, so
-- there is none left to be set right and KEYS[2] is dropped. O(1).

local old = redis.call('HMGET', KEYS[1], 'e', 'g', 'c', 'n', 'f')
local pages = redis.call('SCARD', KEYS[2])
if old[1] and old[3] == ARGV[3] then
  local n = tonumber(old[4])
  if n == tonumber(ARGV[4]) then return {old[1], pages, old[5] or '0'} end
  if n > tonumber(ARGV[4]) then return {'', pages, '0'} end
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local epoch = string.format('%.0f', math.max(now, (tonumber(old[1] or 0) or 0) + 1))
if old[2] ~= ARGV[2] and pages > 0 then
  redis.call('UNLINK', KEYS[2])
  pages = 0
end
redis.call('HSET', KEYS[1], 'e', epoch, 'o', ARGV[1], 'g', ARGV[2], 's', '0', 'i', '0', 'c', ARGV[3], 'n', ARGV[4], 'f', old[1] or '0')
return {epoch, pages, old[1] or '0'}
