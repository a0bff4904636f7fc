-- own.lua: read this region's pairs of pages of one bucket.
--
-- KEYS[1]  {b}:s  hash, see fence.lua   KEYS[2]  {b}:l  zset, see counts.lua
-- KEYS[3…] {b}:c:<page>  hashes, see counts.lua
-- ARGV[1]  length of the page keys' prefix
-- Returns  'incarnation increments decrements' per page; '' when the page is void or
--          forgotten: then it goes from the log, too.
-- A pair of an incarnation below the log's floor is given one above. Safe to repeat.
-- O(pages).

local state = redis.call('HMGET', KEYS[1], 'r', 'f', 'h', 'd')
local rebuild, floor = state[1] or '0', tonumber(state[2] or 0)
local given, forgot = math.max(tonumber(state[3] or 0), floor - 1), tonumber(state[4] or 0)
local prefix, reply, gone, raised = tonumber(ARGV[1]), {}, {}, false
redis.call('ZCARD', KEYS[2])
for k = 3, #KEYS do
  local page = redis.call('HMGET', KEYS[k], 'v', 'l')
  reply[k - 2] = ''
  if not page[1] then
    gone[#gone + 1] = string.sub(KEYS[k], prefix + 1)
  elseif page[2] and string.match(page[1], '^%d+') == rebuild then
    if tonumber(string.match(page[2], '^%d+')) < floor then
      given, raised = given + 1, true
      page[2] = string.format('%.0f ', given) .. string.match(page[1], '^%d+ (%d+)') .. ' 0'
      redis.call('HSET', KEYS[k], 'l', page[2])
    end
    reply[k - 2] = page[2]
  end
end
if raised then redis.call('HSET', KEYS[1], 'h', string.format('%.0f', given)) end
if #gone > 0 then
  for _, page in ipairs(gone) do forgot = math.max(forgot, tonumber(redis.call('ZSCORE', KEYS[2], page) or 0)) end
  redis.call('HSET', KEYS[1], 'd', string.format('%.0f', forgot))
  redis.call('ZREM', KEYS[2], unpack(gone))
end
return reply
