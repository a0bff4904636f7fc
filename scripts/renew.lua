-- renew.lua: keep a process's lease, and the cluster facts with it.
--
-- KEYS[1]  {c}:facts  hash: name -> value
-- KEYS[2]  {c}:leases hash: name of a process -> 'end-in-unix-ms incarnation roles'
-- ARGV[1]  name   ARGV[2]  incarnation   ARGV[3]  roles   ARGV[4]  ttl in ms
-- ARGV[5]  1: write the facts when they are missing   ARGV[6…]  fact, value, …
-- Returns  {'ok', name, 'end incarnation roles', …} of all live leases,
--          {'missing'} when there are no facts and they may not be written,
--          {'differs', fact, value in KEYS[1]} or {'taken', ms left of that lease}.
-- Safe to repeat: a lease is moved, not added. O(processes).

local facts = redis.call('HGETALL', KEYS[1])
local leases = redis.call('HGETALL', KEYS[2])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local known = {}
for i = 1, #facts, 2 do known[facts[i]] = facts[i + 1] end
if #facts > 0 then
  for i = 6, #ARGV, 2 do
    if known[ARGV[i]] ~= ARGV[i + 1] then return {'differs', ARGV[i], known[ARGV[i]] or ''} end
  end
elseif ARGV[5] ~= '1' then
  return {'missing'}
end
local reply, over = {'ok'}, {}
for i = 1, #leases, 2 do
  local ends, incarnation = string.match(leases[i + 1], '^(%d+) (%d+) ')
  local left = tonumber(ends or 0) - now
  if leases[i] == ARGV[1] then
    if left > 0 and incarnation ~= ARGV[2] then return {'taken', string.format('%.0f', left)} end
  elseif left <= 0 then
    over[#over + 1] = leases[i]
  else
    reply[#reply + 1] = leases[i]
    reply[#reply + 1] = leases[i + 1]
  end
end
if #facts == 0 then redis.call('HSET', KEYS[1], unpack(ARGV, 6)) end
if #over > 0 then redis.call('HDEL', KEYS[2], unpack(over)) end
local lease = string.format('%.0f ', now + ARGV[4]) .. ARGV[2] .. ' ' .. ARGV[3]
redis.call('HSET', KEYS[2], ARGV[1], lease)
reply[#reply + 1] = ARGV[1]
reply[#reply + 1] = lease
return reply
