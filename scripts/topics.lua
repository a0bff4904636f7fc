-- topics.lua: read versions of changes and follows of one bucket and, for a
-- gateway, attach it to them.
--
-- KEYS[1]  {b}:s  hash, see fence.lua   KEYS[2]  {b}:e  set of endpoints, see read.lua
-- KEYS[3…] {b}:h:<page>, see change.lua, or {b}:u:<user>, see save.lua
-- ARGV[1]  channel   ARGV[2]  PUBLISH or SPUBLISH   ARGV[3]  gateway; empty: only read
-- ARGV[4…] the topics of KEYS[3…]
-- Returns  'users updated incarnation sequence' per topic
-- Safe to repeat: an endpoint that is there is not told again. O(topics).

local reply, body = {}, {}
for k = 3, #KEYS do
  if string.sub(ARGV[k + 1], 1, 3) == '\238\128\128' then -- U+E000: changes
    reply[k - 2] = redis.call('HGET', KEYS[k], 'v') or '0 0 0 0'
  else
    local version = string.match(redis.call('HGET', KEYS[k], '') or '', '^%d+ %d+') or '0 0'
    reply[k - 2] = '0 0 ' .. version
  end
end
local gateway = ARGV[3]
if gateway ~= '' then
  redis.call('SCARD', KEYS[2])
  for k = 3, #KEYS do
    local topic = ARGV[k + 1]
    if redis.call('SADD', KEYS[2], gateway .. '\0' .. topic) == 1 then
      body[#body + 1] = string.format('+ %d %d\n', #topic, #gateway) .. topic .. gateway
    end
  end
  if #body > 0 then
    local q = redis.call('HINCRBY', KEYS[1], 'q', 1)
    redis.call(ARGV[2], ARGV[1], string.format('%.0f 0 0\n', q) .. table.concat(body))
  end
end
return reply
