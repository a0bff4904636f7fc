-- minutes.lua: read what a page remembers.
--
-- KEYS[1]  {b}:s  hash, see README.md   KEYS[2]  {b}:c:<page>  string, see page.lua
-- KEYS[3]  {b}:x:<page>   KEYS[4…] {b}:y:<hour>:<page>  see remember.lua
-- Returns  {minute of the last change, or 0; the greatest count in it; the count now; the
--          string; fields and values of each hash}.
-- It changes nothing. O(what it returns).
--#include pairs.lua
--#include page.lua

local state = redis.call('HMGET', KEYS[1], 'rebuild', 'peers')
local text = redis.call('GET', KEYS[2])
local r, users, updated, _, _, _, _, length, most = readPage(text, KEYS[2])
local reply = {0, 0, 0, redis.call('GET', KEYS[3]) or ''}
if r and r == tonumber(state[1] or 0) then
  users = users + elsewhere(pairsOf(text, length), readPeers(state[2], updated), updated)
  reply[1], reply[2], reply[3] = math.floor(updated / 60), math.max(most, users), users
end
for k = 4, #KEYS do reply[#reply + 1] = redis.call('HGETALL', KEYS[k]) end
return reply
