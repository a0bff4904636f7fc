-- minutes.lua: read the minutes of a page.
--
-- KEYS[1]  {b}:s  hash, see README.md   KEYS[2]  {b}:c:<page>  string, see page.lua
-- KEYS[3]  {b}:x:<page>   KEYS[4…] {b}:y:<hour>:<page>  see remember.lua
-- Returns  {minute of the last change, or 0; the greatest count in it; the count now; the
--          string; fields and values of each hash}.
-- Reads only. O(size of the reply).
--#include pairs.lua
--#include page.lua

local state = redis.call('HMGET', KEYS[1], 'rebuild', 'peers', 'voided')
local text = redis.call('GET', KEYS[2])
local r, users, updated, _, _, _, _, length, most = readPage(text, KEYS[2])
local ended, reply = {redis.call('GET', KEYS[3]) or ''}, {0, 0, 0, ''}
if r then
  local others = elsewhere(pairsOf(text, length), readPeers(state[2], updated), updated)
  if r ~= tonumber(state[1] or 0) then
    most = remembered(ended, nil, updated, most, users + others, others, tonumber(state[3] or 0))
    users, updated = 0, tonumber(state[3] or 0)
  end
  users = users + others
  reply = {math.floor(updated / 60), math.max(most, users), users, table.concat(ended)}
else
  reply[4] = ended[1]
end
for k = 4, #KEYS do reply[#reply + 1] = redis.call('HGETALL', KEYS[k]) end
return reply
