-- detach.lua: take a gateway from pages of one bucket.
--
-- KEYS[1]  {b}:s  hash, see fence.lua   KEYS[2]  {b}:e  set of endpoints, see read.lua
-- ARGV[1]  channel   ARGV[2]  PUBLISH or SPUBLISH   ARGV[3]  gateway   ARGV[4…]  pages
-- Returns  number of endpoints that were there.
-- Safe to repeat: what is not there is not told again. O(pages).

local gateway, body = ARGV[3], {}
redis.call('HLEN', KEYS[1])
for i = 4, #ARGV do
  local page = ARGV[i]
  if redis.call('SREM', KEYS[2], gateway .. '\0' .. page) == 1 then
    body[#body + 1] = string.format('- %d %d\n', #page, #gateway) .. page .. gateway
  end
end
if #body > 0 then
  local q = redis.call('HINCRBY', KEYS[1], 'q', 1)
  redis.call(ARGV[2], ARGV[1], string.format('%.0f 0 0\n', q) .. table.concat(body))
end
return #body
