-- change.lua: count a change of one page, once per key, and publish the level.
--
-- KEYS[1]  {b}:s  hash, see fence.lua
-- KEYS[2]  {b}:h:<page>  hash: i incarnation, n changes, a those that had an author,
--                 t time of the last, k authors there are, o<user> 'changes last
--                 before' of an author: how many, n at the last, time of the last
--                 change by somebody else before that; r<a mod 8> 'a changes last
--                 before user' after the newest changes by authors
-- KEYS[3]  {b}:i:<hash>  string: the key has been seen; left out: there is no key
-- ARGV[1]  channel   ARGV[2]  PUBLISH or SPUBLISH   ARGV[3]  topic
-- ARGV[4]  author, or empty   ARGV[5]  authors there may be
-- ARGV[6]  seconds the key is remembered
-- Returns  1, or 0 when the key had been seen.
-- Safe to repeat with a key; without one each run counts. O(1).

if KEYS[3] and redis.call('EXISTS', KEYS[3]) == 1 then return 0 end
local user = ARGV[4]
local old = redis.call('HMGET', KEYS[2], 'i', 'n', 'a', 't', 'k', 'o' .. user)
local q = redis.call('HINCRBY', KEYS[1], 'q', 1)
local time = redis.call('TIME')
local inc = old[1] or string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
local last, by, authors = tonumber(old[2] or 0), tonumber(old[3] or 0), tonumber(old[5] or 0)
local n = string.format('%.0f', last + 1)
local sets = {'i', inc, 'n', n, 't', time[1]}
if user ~= '' and (old[6] or authors < tonumber(ARGV[5])) then
  by = by + 1
  local changes, before = 0, old[4] or '0'
  if old[6] then
    local c, l, b = string.match(old[6], '^(%d+) (%d+) (%d+)$')
    changes = tonumber(c)
    if tonumber(l) == last then before = b end
  else
    sets[#sets + 1] = 'k'
    sets[#sets + 1] = authors + 1
  end
  local own = string.format('%.0f %s %s', changes + 1, n, before)
  for _, v in ipairs({'a', string.format('%.0f', by), 'o' .. user, own, 'r' .. by % 8, string.format('%.0f %s %s', by, own, user)}) do
    sets[#sets + 1] = v
  end
end
redis.call('HSET', KEYS[2], unpack(sets))
if KEYS[3] then redis.call('SET', KEYS[3], '', 'EX', ARGV[6]) end
redis.call(ARGV[2], ARGV[1], string.format('%.0f 0 0\nc %d %.0f %s %s %s\n', q, #ARGV[3], by, time[1], inc, n) .. ARGV[3])
return 1
