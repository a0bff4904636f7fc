-- read.lua: read the counts of pages of one bucket. If the caller names a gateway, attach
-- the gateway to the pages. (values.lua does the same for other kinds of topics.)
--
-- KEYS[1]  {b}:s  hash, see README.md   KEYS[2]  {b}:r  set: complete partitions
-- KEYS[3]  {b}:e  set of endpoints, see values.lua
-- KEYS[4…] {b}:c:<page>  strings, see page.lua
-- ARGV[1]  channel   ARGV[2]  PUBLISH or SPUBLISH   ARGV[3]  number of partitions
-- ARGV[4]  length of the prefix of the pages' keys   ARGV[5]  prefix of the pages' topics
-- ARGV[6]  gateway; empty: only read   ARGV[7]  1: return the regions' parts too
-- Returns  {'1' if counts may lack users, otherwise '0'; the bucket's generation, or ''; then
--          'incarnation sequence value' per page (countValue); then, if asked, the parts of each
--          page: the users in this region and ' name=users' per region that counts}
-- Safe to repeat: only a new endpoint is published. O(pages).
--#include pairs.lua
--#include publish.lua
--#include page.lua

local state = redis.call('HMGET', KEYS[1], 'rebuild', 'void', 'base', 'voided', 'peers', 'offset', 'generation')
local rebuild, void, base = tonumber(state[1] or 0), tonumber(state[2] or 0), tonumber(state[3] or 0)
local offset = tonumber(state[6] or 0)
local peers, waits, out = readPeers(state[5], tonumber(redis.call('TIME')[1]))
local stale = redis.call('SCARD', KEYS[2]) < tonumber(ARGV[3]) or waits
local reply, parts = {stale and '1' or '0', state[7] or ''}, {}
local pages = redis.call('MGET', unpack(KEYS, 4))
for k = 4, #KEYS do
  local text = pages[k - 3]
  local r, users, updated, inc, seq, _, _, length = readPage(text, KEYS[k])
  local pairsText = r and pairsOf(text, length) or ''
  if r and r ~= rebuild then
    users, updated, inc, seq = 0, tonumber(state[4] or 0), math.max(void, inc + 1), 0
  end
  if not r then
    users = 0
    reply[k - 1] = string.format('%.0f 0 ', base) .. countValue(0, 0, out)
  elseif length > 0 or offset > 0 then
    local others, latest = elsewhere(pairsText, peers, updated)
    reply[k - 1] = whole(inc) .. ' ' .. seq + offset .. ' ' .. countValue(users + others, latest, out)
  else
    reply[k - 1] = whole(inc) .. ' ' .. seq .. ' ' .. countValue(users, updated, out)
  end
  if ARGV[7] == '1' then
    local part = string.format('%.0f', users) -- a number in a reply would not be text
    for name, peer in pairs(peers) do
      if peer.flag ~= '0' then part = part .. ' ' .. name .. '=' .. (elsewhere(pairsText, {[name] = peer}, '0')) end
    end
    parts[#parts + 1] = part
  end
end
for _, part in ipairs(parts) do reply[#reply + 1] = part end
local gateway = ARGV[6]
if gateway ~= '' then
  local prefix, records = tonumber(ARGV[4]), {}
  redis.call('SCARD', KEYS[3]) -- with foreign data the script fails here, before it writes
  for k = 4, #KEYS do attach(KEYS[3], gateway, ARGV[5] .. string.sub(KEYS[k], prefix + 1), records) end
  if #records > 0 then publish(KEYS[1], ARGV[1], ARGV[2], stale, false, '', records) end
end
return reply
