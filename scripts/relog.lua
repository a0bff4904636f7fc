-- relog.lua: begin a bucket's log, or put pages into it again.
--
-- KEYS[1]  {b}:s  hash, see README.md   KEYS[2]  {b}:l  zset, see counts.lua
-- KEYS[3…] {b}:c:<page>  strings, see page.lua
-- ARGV[1]  the highest incarnation of this region that a peer knows
-- ARGV[2]  length of the prefix of the pages' keys
-- ARGV[3]  the number of a log that has all pages now, if it is still the bucket's; or empty
-- Returns  the number of the log. If there was none, it begins and lacks pages.
-- Without pages the log gets a number above ARGV[1]. With pages, their pairs get
-- incarnations above ARGV[1]. So the peer accepts them as newer than its own data.
-- Safe to repeat. O(pages).
--#include page.lua

local state = redis.call('HMGET', KEYS[1], 'log', 'void', 'rebuild', 'given')
local high = tonumber(ARGV[1])
local time = redis.call('TIME')
local fresh = string.format('%.0f', math.max(time[1] * 1000 + math.floor(time[2] / 1000), high + 1,
  tonumber(state[2] or 0) + 1, tonumber(state[4] or 0) + 1))
local log, prefix, pages, raise = state[1], tonumber(ARGV[2]), {}, {}
for k = 3, #KEYS do
  local text = redis.pcall('GET', KEYS[k])
  if type(text) == 'string' and isPage(text) then -- otherwise it is forgotten, or the value of another program
    local r, users, updated, inc, seq, own = readPage(text)
    pages[#pages + 1] = string.sub(KEYS[k], prefix + 1)
    -- The peer knows a higher incarnation of this pair, and would refuse this one.
    if r == tonumber(state[3] or 0) and own <= high then
      raise[#raise + 1] = {KEYS[k], pageCounts(r, users, updated, inc, seq, tonumber(fresh), 0)}
    end
  end
end
redis.call('ZCARD', KEYS[2])
for _, w in ipairs(raise) do redis.call('SETRANGE', w[1], 0, w[2]) end
if not log then
  log = fresh
  -- a peer may have pages that this region forgot while there was no log
  redis.call('HSET', KEYS[1], 'log', log, 'floor', log, 'lacking', '1')
  redis.call('HDEL', KEYS[1], 'places', 'forgotten')
  redis.call('UNLINK', KEYS[2])
elseif tonumber(log) <= high and #KEYS == 2 then
  log = fresh -- all pairs must have at least this incarnation, see own.lua
  redis.call('HSET', KEYS[1], 'log', log, 'floor', log)
  redis.call('HDEL', KEYS[1], 'forgotten')
end
if #raise > 0 or log == fresh then redis.call('HSET', KEYS[1], 'given', fresh) end
if #pages > 0 then
  local n, places = redis.call('HINCRBY', KEYS[1], 'places', #pages), {}
  for i, page in ipairs(pages) do
    places[2 * i - 1] = string.format('%.0f', n - #pages + i)
    places[2 * i] = page
  end
  redis.call('ZADD', KEYS[2], unpack(places))
end
if ARGV[3] == log then redis.call('HDEL', KEYS[1], 'lacking') end
return log
