-- read.lua: read counts of pages of one bucket and, for a gateway, attach it to them.
--
-- KEYS[1]  {b}:s  hash, see fence.lua   KEYS[2]  {b}:r  set: complete partitions
-- KEYS[3]  {b}:e  set of endpoints: gateway, a zero byte, page
-- KEYS[4…] {b}:c:<page>  hashes, see counts.lua
-- ARGV[1]  channel   ARGV[2]  PUBLISH or SPUBLISH   ARGV[3]  partitions there are
-- ARGV[4]  length of the page keys' prefix   ARGV[5]  gateway; empty: only read
-- Returns  {1 while not all partitions are complete, then 'users updated
--          incarnation sequence' per page}
-- Safe to repeat: an endpoint that is there is not told again. O(pages).

local state = redis.call('HMGET', KEYS[1], 'r', 'x', 'b', 't')
local rebuild, void, base = state[1] or '0', tonumber(state[2] or 0), tonumber(state[3] or 0)
local stale = redis.call('SCARD', KEYS[2]) < tonumber(ARGV[3]) and 1 or 0
local reply = {stale}
for k = 4, #KEYS do
  local v = redis.call('HGET', KEYS[k], 'v')
  local r, total, inc
  if v then r, total, inc = string.match(v, '^(%d+) (%d+ %d+ (%d+) %d+)$') end
  if not r then
    reply[k - 2] = string.format('0 0 %.0f 0', base)
  elseif r ~= rebuild then
    reply[k - 2] = string.format('0 %s %.0f 0', state[4] or '0', math.max(void, inc + 1))
  else
    reply[k - 2] = total
  end
end
local gateway = ARGV[5]
if gateway ~= '' then
  local prefix, body = tonumber(ARGV[4]), {}
  redis.call('SCARD', KEYS[3])
  for k = 4, #KEYS do
    local page = string.sub(KEYS[k], prefix + 1)
    if redis.call('SADD', KEYS[3], gateway .. '\0' .. page) == 1 then
      body[#body + 1] = string.format('+ %d %d\n', #page, #gateway) .. page .. gateway
    end
  end
  if #body > 0 then
    local q = redis.call('HINCRBY', KEYS[1], 'q', 1)
    redis.call(ARGV[2], ARGV[1], string.format('%.0f %d 0\n', q, stale) .. table.concat(body))
  end
end
return reply
