-- renew.lua: keep a process's lease, and the cluster facts with it.
--
-- KEYS[1]  {c}:facts  hash: name -> value
-- KEYS[2]  {c}:leases hash: name of a process -> 'end-in-unix-ms incarnation roles'
-- ARGV[1]  name   ARGV[2]  incarnation   ARGV[3]  roles   ARGV[4]  ttl in ms
-- ARGV[5]  1: write the facts when they are missing   ARGV[6…]  fact, value, …;
--          a value may be a list, a,b,c: any of them is right, the first is written
-- Returns  {'ok', name, 'end incarnation roles', …} of all live leases,
--          {'missing'} when there are no facts and they may not be written,
--          {'differs', fact, value in KEYS[1]} or {'taken', ms left of that lease}.
-- Safe to repeat: a lease is moved, not added. O(processes).

local leases = redis.call('HGETALL', KEYS[2])
local held = false -- facts and leases live and die together: who was accepted and has its lease need not look again
for i = 1, #leases, 2 do
  held = held or ARGV[5] == '1' and leases[i] == ARGV[1] and string.match(leases[i + 1], '^%d+ (%d+) ') == ARGV[2]
end
local missing = false
if not held then
  local facts = redis.call('HGETALL', KEYS[1])
  missing = #facts == 0
  if missing and ARGV[5] ~= '1' then return {'missing'} end
  local known = {}
  for i = 1, #facts, 2 do known[facts[i]] = facts[i + 1] end
  for i = 6, #ARGV, 2 do
    local value, ours = known[ARGV[i]], ARGV[i + 1]
    if not missing and not (value and string.find(',' .. ours .. ',', ',' .. value .. ',', 1, true)) then
      return {'differs', ARGV[i], value or ''}
    end
  end
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
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
if not held then -- of a list of values the first is written: secrets rotate
  for i = 6, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], (string.gsub(ARGV[i + 1], ',.*', ''))) end
end
if #over > 0 then redis.call('HDEL', KEYS[2], unpack(over)) end
local lease = string.format('%.0f ', now + ARGV[4]) .. ARGV[2] .. ' ' .. ARGV[3]
redis.call('HSET', KEYS[2], ARGV[1], lease)
reply[#reply + 1] = ARGV[1]
reply[#reply + 1] = lease
return reply
