-- days.lua: read the days of a page.
--
-- KEYS[1]  {b}:s  hash, see README.md   KEYS[2]  {b}:c:<page>  string, see page.lua
-- KEYS[3]  {b}:d:<page>  string, see remember.lua
-- Returns  {time of the last change, or 0; the greatest count in its minute; the count now; the area at that time,
--          see present in page.lua; the string, or ''}.
-- Reads only. O(size of the reply).
--#include pairs.lua
--#include page.lua

local state = redis.call('HMGET', KEYS[1], 'rebuild', 'peers', 'voided')
local days = redis.call('GET', KEYS[3]) or ''
local text = redis.call('GET', KEYS[2])
local r, users, updated, _, _, _, _, length, most = readPage(text, KEYS[2])
if not r then return {0, 0, 0, 0, days} end
local area
area, text, length = cutArea(text, length, updated)
local others = elsewhere(pairsOf(text, length), readPeers(state[2], updated), updated)
if r ~= tonumber(state[1] or 0) then
  local voided = tonumber(state[3] or 0)
  area = present(area, updated, users + others, -users, voided, 0)
  if math.floor(voided / 60) > math.floor(updated / 60) then most = users + others end
  users, updated = 0, voided
end
users = users + others
return {updated, math.max(most, users), users, area, days}
