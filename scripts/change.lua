-- change.lua: count a change of one page, once per idempotency key, and publish the level.
--
-- KEYS[1]  {b}:s  hash, see README.md
-- KEYS[2]  {b}:h:<page>  hash, see README.md
-- KEYS[3]  {b}:i:<hash>  string: exists if the idempotency key was used; left out without a key
-- ARGV[1]  channel   ARGV[2]  PUBLISH or SPUBLISH   ARGV[3]  topic
-- ARGV[4]  author, or empty   ARGV[5]  most authors that a page may have
-- ARGV[6]  seconds for which the key is remembered
-- ARGV[7]  note: title and URL of the change (unread.Change.Value), or empty
-- Returns  1, or 0 if the key was used before.
-- Safe to repeat with a key. Without a key every run counts. O(1).
--#include publish.lua
--#include void.lua

if KEYS[3] and redis.call('EXISTS', KEYS[3]) == 1 then return 0 end
local user = ARGV[4]
local old = redis.call('HMGET', KEYS[2], 'level', 'authors', 'by:' .. user)
local void = redis.call('HGET', KEYS[1], 'void')
local time = redis.call('TIME')
local by, before, inc, last = 0, '0', string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000)), 0
if old[1] then
  inc, last, by, before = string.match(old[1], '^(%d+) (%d+) (%d+) (%d+)$')
  by, last = tonumber(by), tonumber(last)
end
local is = incarnationOf(inc, void)
local n, authors = string.format('%.0f', last + 1), tonumber(old[2] or 0)
local sets = {}
-- Redis may have lost changes. Those that are left are noted, so that what was seen of them stays seen.
if is ~= inc then
  inc = is
  sets[1], sets[2] = 'before', string.format('%.0f', last)
end
if user ~= '' and (old[3] or authors < tonumber(ARGV[5])) then
  by = by + 1
  local changes = 0
  if old[3] then
    local c, l, b = string.match(old[3], '^(%d+) (%d+) (%d+)$')
    changes = tonumber(c)
    -- Two changes of one author in a row have the same change of somebody else before them.
    if tonumber(l) == last then before = b end
  else
    sets[#sets + 1] = 'authors'
    sets[#sets + 1] = authors + 1
  end
  local own = string.format('%.0f %s %s', changes + 1, n, before)
  for _, v in ipairs({'by:' .. user, own, 'new' .. by % 8, string.format('%.0f %s %s', by, own, user)}) do
    sets[#sets + 1] = v
  end
end
if (ARGV[7] or '') ~= '' then
  sets[#sets + 1] = 'note'
  sets[#sets + 1] = n .. ' ' .. ARGV[7]
end
local value = string.format('%.0f %s', by, time[1])
redis.call('HSET', KEYS[2], 'level', inc .. ' ' .. n .. ' ' .. value, unpack(sets))
-- Not before the change: a key without it would have the repetition take the change for made.
if KEYS[3] then redis.call('SET', KEYS[3], '', 'EX', ARGV[6]) end
publish(KEYS[1], ARGV[1], ARGV[2], false, false, '', {updateRecord(ARGV[3], inc, n, value)})
return 1
