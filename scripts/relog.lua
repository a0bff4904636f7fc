-- relog.lua: begin a bucket's log, or put pages into it anew.
--
-- KEYS[1]  {b}:s  hash, see fence.lua   KEYS[2]  {b}:l  zset, see counts.lua
-- KEYS[3…] {b}:c:<page>  hashes, see counts.lua
-- ARGV[1]  highest incarnation of this region that a peer knows
-- ARGV[2]  length of the page keys' prefix
-- ARGV[3]  1: the log lacks pages from now on, unless there is one; 0: it has all; empty: no word
-- Returns  number of the log.
-- Without pages the log gets a number above ARGV[1], else the pages' pairs get
-- incarnations above it: what this region says is news to the peer then.
-- Safe to repeat. O(pages).

local state = redis.call('HMGET', KEYS[1], 'o', 'x', 'r', 'h')
local high = tonumber(ARGV[1])
local time = redis.call('TIME')
local fresh = string.format('%.0f', math.max(time[1] * 1000 + math.floor(time[2] / 1000), high + 1, tonumber(state[2] or 0), tonumber(state[4] or 0) + 1))
local log, prefix, pages, raise = state[1], tonumber(ARGV[2]), {}, {}
for k = 3, #KEYS do
  local page = redis.call('HMGET', KEYS[k], 'v', 'l')
  local rebuild, users
  if page[1] then rebuild, users = string.match(page[1], '^(%d+) (%d+) ') end
  if rebuild then
    pages[#pages + 1] = string.sub(KEYS[k], prefix + 1)
    if rebuild == (state[3] or '0') and tonumber(string.match(page[2], '^%d+')) <= high then
      raise[#raise + 1] = {KEYS[k], fresh .. ' ' .. users .. ' 0'}
    end
  end
end
redis.call('ZCARD', KEYS[2])
for _, w in ipairs(raise) do redis.call('HSET', w[1], 'l', w[2]) end
if #raise > 0 then redis.call('HSET', KEYS[1], 'h', fresh) end
if not log then
  log = fresh
  redis.call('HSET', KEYS[1], 'o', log, 'f', log, 'i', '1') -- a peer may have what was forgotten without a log
  redis.call('HDEL', KEYS[1], 'n', 'd')
  redis.call('UNLINK', KEYS[2])
elseif tonumber(log) <= high and #KEYS == 2 then
  log = fresh -- and all pairs are to be at least of that incarnation, see own.lua
  redis.call('HSET', KEYS[1], 'o', log, 'f', log)
  redis.call('HDEL', KEYS[1], 'd')
end
if #pages > 0 then
  local n, places = redis.call('HINCRBY', KEYS[1], 'n', #pages), {}
  for i, page in ipairs(pages) do
    places[2 * i - 1] = string.format('%.0f', n - #pages + i)
    places[2 * i] = page
  end
  redis.call('ZADD', KEYS[2], unpack(places))
end
if ARGV[3] == '0' then redis.call('HDEL', KEYS[1], 'i') end
return log
