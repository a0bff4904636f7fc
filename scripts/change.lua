-- change.lua: count a change of one page, once per key, and publish the level.
--
-- KEYS[1]  {b}:s  hash, see fence.lua
-- KEYS[2]  {b}:h:<page>  hash: v 'authored time incarnation changes': how many
--                 changes had an author, when the last was, how many there are;
--                 k number of authors; o<user> 'changes last before' of an author:
--                 how many, the page's changes at the last, time of the last one by
--                 somebody else before that; r<authored mod 8> 'authored changes
--                 last before user' after each of the newest changes by authors
-- KEYS[3]  {b}:i:<hash>  string: the key has been seen; left out: there is no key
-- ARGV[1]  channel   ARGV[2]  PUBLISH or SPUBLISH   ARGV[3]  topic
-- ARGV[4]  author, or empty   ARGV[5]  authors there may be
-- ARGV[6]  seconds the key is remembered
-- Returns  1, or 0 when the key had been seen.
-- Safe to repeat with a key; without one each run counts. O(1).

if KEYS[3] and redis.call('EXISTS', KEYS[3]) == 1 then return 0 end
local user = ARGV[4]
local old = redis.call('HMGET', KEYS[2], 'v', 'k', 'o' .. user)
local q = redis.call('HINCRBY', KEYS[1], 'q', 1)
local time = redis.call('TIME')
local by, before, inc, last = 0, '0', string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000)), 0
if old[1] then
  by, before, inc, last = string.match(old[1], '^(%d+) (%d+) (%d+) (%d+)$')
  by, last = tonumber(by), tonumber(last)
end
local n, authors = string.format('%.0f', last + 1), tonumber(old[2] or 0)
local sets = {}
if user ~= '' and (old[3] or authors < tonumber(ARGV[5])) then
  by = by + 1
  local changes = 0
  if old[3] then
    local c, l, b = string.match(old[3], '^(%d+) (%d+) (%d+)$')
    changes = tonumber(c)
    if tonumber(l) == last then before = b end
  else
    sets[#sets + 1] = 'k'
    sets[#sets + 1] = authors + 1
  end
  local own = string.format('%.0f %s %s', changes + 1, n, before)
  for _, v in ipairs({'o' .. user, own, 'r' .. by % 8, string.format('%.0f %s %s', by, own, user)}) do
    sets[#sets + 1] = v
  end
end
local level = string.format('%.0f %s %s %s', by, time[1], inc, n)
redis.call('HSET', KEYS[2], 'v', level, unpack(sets))
if KEYS[3] then redis.call('SET', KEYS[3], '', 'EX', ARGV[6]) end
redis.call(ARGV[2], ARGV[1], string.format('%.0f 0 0\nc %d %s\n', q, #ARGV[3], level) .. ARGV[3])
return 1
