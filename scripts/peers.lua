-- peers.lua: set the peers of one bucket, and which of them its totals leave out, as
-- this region has decided.
--
-- KEYS[1]  {b}:s  hash, see README.md   KEYS[2]  {b}:r  set: complete partitions
-- KEYS[3]  {b}:l  zset: the log; it is not needed without peers
-- ARGV[1]  channel   ARGV[2]  PUBLISH or SPUBLISH   ARGV[3]  number of partitions
-- ARGV[4…] peer, 1: in totals or 0: left out, …
-- Returns  1 if something changed.
-- Totals are added up when they are read, so one change here changes the totals of all
-- pages at once. The script raises offset, which is added to the sequences of all
-- versions, and publishes that readers must read again. When a peer is added, or removed for
-- good, the bucket keeps only the peer's highest incarnation. The peer then sends everything
-- again under higher incarnations. Safe to repeat. O(peers).
--#include pairs.lua
--#include publish.lua

local state = redis.call('HMGET', KEYS[1], 'peers')
local complete = redis.call('SCARD', KEYS[2])
local now = redis.call('TIME')[1]
local peers = readPeers(state[1], tonumber(now))
local z, forget, changed, want = {}, {}, false, {}

-- flagOf returns the flag of a peer that was left out, or is now. The bucket may lack the pairs of one that returns.
local function flagOf(name, inside)
  if not inside then return '0' end
  local done = string.match(redis.call('HGET', KEYS[1], 'peer:' .. name) or '', ' 1$')
  return done and '1' or '2'
end

for i = 4, #ARGV, 2 do
  local name, inside = ARGV[i], ARGV[i + 1] == '1'
  local peer = peers[name]
  want[name] = true
  if not peer then
    changed = true
    forget[#forget + 1] = name
    z[#z + 1] = name .. ' ' .. (inside and '2' or '0') .. ' 0 ' .. now .. ' 0;'
  elseif (peer.flag ~= '0') ~= inside then
    changed = true
    z[#z + 1] = string.format('%s %s %.0f %s %.0f;', name, flagOf(name, inside), peer.floor, now, peer.raised)
  else
    z[#z + 1] = string.format('%s %s %.0f %.0f %.0f;', name, peer.flag, peer.floor, peer.since, peer.raised)
  end
end
for name in pairs(peers) do
  if not want[name] then
    changed = true
    forget[#forget + 1] = name
  end
end
if not changed then return 0 end
redis.call('HSET', KEYS[1], 'peers', table.concat(z))
for _, name in ipairs(forget) do
  local high = string.match(redis.call('HGET', KEYS[1], 'peer:' .. name) or '', '^%d+ %d+ (%d+) %d$')
  if high then redis.call('HSET', KEYS[1], 'peer:' .. name, '0 0 ' .. high .. ' 0') end
end
if #z == 0 then
  redis.call('UNLINK', KEYS[3])
  redis.call('HDEL', KEYS[1], 'log', 'places', 'lacking', 'floor', 'forgotten')
end
redis.call('HINCRBY', KEYS[1], 'offset', 1)
redis.call('HINCRBY', KEYS[1], 'sweep', 1)
local _, waits = readPeers(table.concat(z), tonumber(now))
publish(KEYS[1], ARGV[1], ARGV[2], waits or complete < tonumber(ARGV[3]), true, '', {})
return 1
