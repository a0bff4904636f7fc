-- read.lua: read counts of pages of one bucket and, for a gateway, attach it to them.
--
-- KEYS[1]  {b}:s  hash, see fence.lua   KEYS[2]  {b}:r  set: complete partitions
-- KEYS[3]  {b}:e  set of endpoints: gateway, a zero byte, page
-- KEYS[4…] {b}:c:<page>  hashes, see counts.lua
-- ARGV[1]  channel   ARGV[2]  PUBLISH or SPUBLISH   ARGV[3]  partitions there are
-- ARGV[4]  length of the page keys' prefix   ARGV[5]  gateway; empty: only read
-- ARGV[6]  1: return the regions' parts, too
-- Returns  {stale, see staleWord, then 'users updated incarnation sequence' per page;
--          with parts the users here and ' name=users' per region counted are appended}
-- Safe to repeat: an endpoint that is there is not told again. O(pages).
--#include pairs.lua

local state = redis.call('HMGET', KEYS[1], 'r', 'x', 'b', 't', 'z', 'y')
local rebuild, void, base = state[1] or '0', tonumber(state[2] or 0), tonumber(state[3] or 0)
local offset = tonumber(state[6] or 0)
local peers, waits, out = readPeers(state[5], tonumber(redis.call('TIME')[1]))
local stale = staleWord(redis.call('SCARD', KEYS[2]) < tonumber(ARGV[3]) or waits, out)
local reply = {stale}
for k = 4, #KEYS do
  local page = redis.call('HMGET', KEYS[k], 'v', 'p')
  local r, users, updated, inc, seq
  if page[1] then r, users, updated, inc, seq = string.match(page[1], '^(%d+) (%d+) (%d+) (%d+) (%d+)$') end
  if r and r ~= rebuild then
    users, updated, inc, seq = '0', state[4] or '0', string.format('%.0f', math.max(void, inc + 1)), 0
  end
  local line
  if not r then
    users, line = '0', string.format('0 0 %.0f 0', base)
  elseif page[2] or offset > 0 then
    local others, latest = elsewhere(page[2], peers, updated)
    line = users + others .. ' ' .. latest .. ' ' .. inc .. ' ' .. seq + offset
  else
    line = users .. ' ' .. updated .. ' ' .. inc .. ' ' .. seq
  end
  if ARGV[6] == '1' then
    line = line .. ' ' .. users
    for name, peer in pairs(peers) do
      if peer.flag ~= '0' then line = line .. ' ' .. name .. '=' .. (elsewhere(page[2], {[name] = peer}, '0')) end
    end
  end
  reply[k - 2] = line
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
    redis.call(ARGV[2], ARGV[1], string.format('%.0f ', q) .. header(stale, 0) .. table.concat(body))
  end
end
return reply
