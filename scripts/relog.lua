-- relog.lua: begin a bucket's log, or put pages into it again.
--
-- KEYS[1]  {b}:s  hash, see README.md   KEYS[2]  {b}:l  zset, see counts.lua
-- KEYS[3…] {b}:c:<page>  strings, see page.lua
-- ARGV[1]  the highest incarnation of this region that a peer knows
-- ARGV[2]  length of the prefix of the pages' keys
-- ARGV[3]  1: if there is no log, it begins and lacks pages; 0: the log has all pages now;
--          empty: neither
-- Returns  the number of the log.
-- Without pages the log gets a number above ARGV[1]. With pages, their pairs get
-- incarnations above ARGV[1]. So the peer accepts them as newer than its own data.
-- Safe to repeat. O(pages).
--#include page.lua

local state = redis.call('HMGET', KEYS[1], 'log', 'void', 'rebuild', 'given')
local high = tonumber(ARGV[1])
local time = redis.call('TIME')
local fresh = string.format('%.0f', math.max(time[1] * 1000 + math.floor(time[2] / 1000), high + 1, tonumber(state[2] or 0), tonumber(state[4] or 0) + 1))
local log, prefix, pages, raise = state[1], tonumber(ARGV[2]), {}, {}
for k = 3, #KEYS do
  local r, users, updated, inc, seq, own = readPage(redis.call('GET', KEYS[k]), KEYS[k])
  if r then
    pages[#pages + 1] = string.sub(KEYS[k], prefix + 1)
    if r == tonumber(state[3] or 0) and own <= high then
      raise[#raise + 1] = {KEYS[k], pageCounts(r, users, updated, inc, seq, tonumber(fresh), 0)}
    end
  end
end
redis.call('ZCARD', KEYS[2])
for _, w in ipairs(raise) do redis.call('SETRANGE', w[1], 0, w[2]) end
if #raise > 0 then redis.call('HSET', KEYS[1], 'given', fresh) end
if not log then
  log = fresh
  redis.call('HSET', KEYS[1], 'log', log, 'floor', log, 'lacking', '1') -- a peer may have pages that this region forgot while there was no log
  redis.call('HDEL', KEYS[1], 'places', 'forgotten')
  redis.call('UNLINK', KEYS[2])
elseif tonumber(log) <= high and #KEYS == 2 then
  log = fresh -- all pairs must have at least this incarnation, see own.lua
  redis.call('HSET', KEYS[1], 'log', log, 'floor', log)
  redis.call('HDEL', KEYS[1], 'forgotten')
end
if #pages > 0 then
  local n, places = redis.call('HINCRBY', KEYS[1], 'places', #pages), {}
  for i, page in ipairs(pages) do
    places[2 * i - 1] = string.format('%.0f', n - #pages + i)
    places[2 * i] = page
  end
  redis.call('ZADD', KEYS[2], unpack(places))
end
if ARGV[3] == '0' then redis.call('HDEL', KEYS[1], 'lacking') end
return log
