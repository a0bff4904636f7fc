-- own.lua: read this region's pairs of pages of one bucket.
--
-- KEYS[1]  {b}:s  hash, see README.md   KEYS[2]  {b}:l  zset, see counts.lua
-- KEYS[3…] {b}:c:<page>  strings, see page.lua
-- ARGV[1]  length of the prefix of the pages' keys
-- Returns  incarnation, increments, decrements per page, or zeros if the page is void or
--          forgotten. A forgotten page is also removed from the log.
-- A pair whose incarnation is below the log's floor gets an incarnation above it. Safe
-- to repeat. O(pages).
--#include page.lua

local state = redis.call('HMGET', KEYS[1], 'rebuild', 'floor', 'given', 'forgotten')
local rebuild, floor = tonumber(state[1] or 0), tonumber(state[2] or 0)
local given, forgot = math.max(tonumber(state[3] or 0), floor - 1), tonumber(state[4] or 0)
local prefix, reply, gone, raised = tonumber(ARGV[1]), {}, {}, false
redis.call('ZCARD', KEYS[2])
for k = 3, #KEYS do
  local pair = {0, 0, 0}
  local r, users, updated, inc, seq, own, down = readPage(redis.call('GET', KEYS[k]), KEYS[k])
  if not r then
    gone[#gone + 1] = string.sub(KEYS[k], prefix + 1)
  elseif r == rebuild then
    -- A peer that has the log up to its end takes pairs below the floor for void.
    if own < floor then
      given, raised, own, down = given + 1, true, given + 1, 0
      redis.call('SETRANGE', KEYS[k], 0, pageCounts(r, users, updated, inc, seq, own, down))
    end
    pair = {own, users + down, down}
  end
  for _, n in ipairs(pair) do reply[#reply + 1] = n end
end
if raised then redis.call('HSET', KEYS[1], 'given', string.format('%.0f', given)) end
if #gone > 0 then
  -- A peer that has not come so far cannot learn from this log that the page has no users: log.lua tells the caller.
  for _, page in ipairs(gone) do forgot = math.max(forgot, tonumber(redis.call('ZSCORE', KEYS[2], page) or 0)) end
  redis.call('HSET', KEYS[1], 'forgotten', string.format('%.0f', forgot))
  redis.call('ZREM', KEYS[2], unpack(gone))
end
return reply
