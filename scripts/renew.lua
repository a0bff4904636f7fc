-- renew.lua: renew a process's lease, and compare or write the cluster facts.
--
-- KEYS[1]  {c}:facts  hash: name -> value
-- KEYS[2]  {c}:leases hash: name of a process -> 'end-in-unix-ms incarnation roles'
-- ARGV[1]  name   ARGV[2]  incarnation   ARGV[3]  roles   ARGV[4]  ttl in ms
-- ARGV[5]  if there are no facts: 0 do not write them, 1 write them, 2 write them, and
--          this process was accepted before
-- ARGV[6]  how many seals to write if there are none   ARGV[7]  how many to add if
--          there are others but these are missing   ARGV[8…]  the seals: id, seal, …
-- then     fact, value, …. A value may be a list, a,b,c: each of its values is accepted,
--          and the first is written. If there are facts, the first given fact is one
--          of them. Any other given fact that is missing belongs to a later version,
--          and is added. The script ignores facts that are not given. The fact counters is
--          written with the first facts and never compared, because processes whose counters
--          have another format can still serve presence. The fact postgres is added as
--          'behind 2', or changed to it from none or behind, only while no other process uses
--          counters. Gateways use them. A process without roles may, as it is starting or ending.
-- Returns  {'ok', number of seals, id, seal, …, name, 'end incarnation roles', …} of all live leases,
--          {'missing'} if there are no facts and they may not be written,
--          {'differs', fact, value in KEYS[1]}, {'taken', ms left of that lease}, or
--          {'wait'}: whether another process uses counters is not known yet.
-- Safe to repeat: a lease is extended, not added. A lease that ends too late, because the clock went back, is
-- shortened. O(processes).

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local leases = redis.call('HGETALL', KEYS[2])
local runs = false -- the process was accepted and has its lease, so it only restores missing facts
local gateways, unclear = false, false -- among the other processes; presence nodes count as gateways here
for i = 1, #leases, 2 do
  local ends, roles = string.match(leases[i + 1], '^(%d+) %d+ (.*)$')
  -- the clock has gone back; a process that runs renews its lease in time
  if tonumber(ends or 0) > now + 3 * ARGV[4] then
    ends = string.format('%.0f', now + ARGV[4])
    leases[i + 1] = string.gsub(leases[i + 1], '^%d+', ends)
    redis.call('HSET', KEYS[2], leases[i], leases[i + 1])
  end
  if leases[i] ~= ARGV[1] and tonumber(ends or 0) > now then
    gateways = gateways or string.find(roles, 'gateway', 1, true) ~= nil or
      string.find(roles, 'presence', 1, true) ~= nil
    unclear = unclear or roles == ''
  end
  runs = runs or ARGV[5] == '2' and leases[i] == ARGV[1] and string.match(leases[i + 1], '^%d+ (%d+) ') == ARGV[2]
end
local facts, known, write, seals = redis.call('HGETALL', KEYS[1]), {}, {}, {}
local adds = 8 + 2 * ARGV[6]
local first = adds + 2 * ARGV[7]
-- A running process may be about to write them again.
if #facts == 0 and ARGV[5] == '0' then return {'missing'} end
for i = 1, #facts, 2 do
  known[facts[i]] = facts[i + 1]
  local id = string.match(facts[i], '^seal:(.*)')
  if id then
    seals[#seals + 1] = id
    seals[#seals + 1] = facts[i + 1]
  end
end
local from, to = adds, first - 2
if #seals == 0 then from, to = 8, adds - 2 end
for i = from, to, 2 do
  if not known['seal:' .. ARGV[i]] then
    seals[#seals + 1] = ARGV[i]
    seals[#seals + 1] = ARGV[i + 1]
    write[#write + 1] = 'seal:' .. ARGV[i]
    write[#write + 1] = ARGV[i + 1]
  end
end
for i = first, #ARGV, 2 do
  local value, ours = known[ARGV[i]], ARGV[i + 1]
  local isCounters = ARGV[i] == 'counters'
  local new = not value and (#facts == 0 or not isCounters and (runs or i > first))
  if ARGV[i] == 'postgres' and ours == 'behind 2' and #facts > 0 and not runs and (value or 'none') ~= ours then
    if unclear and not gateways then return {'wait'} end
    new = not gateways and value ~= 'beside'
  end
  if not new and not runs and not isCounters and
    not (value and string.find(',' .. ours .. ',', ',' .. value .. ',', 1, true)) then
    return {'differs', ARGV[i], value or ''}
  end
  if new or not runs and not isCounters then -- the first value of a list is written, so that secrets can rotate
    write[#write + 1] = ARGV[i]
    write[#write + 1] = (string.gsub(ours, ',.*', ''))
  end
end
local reply, over = {'ok', tostring(#seals / 2), unpack(seals)}, {}
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
-- Nothing is written before it is clear that the process gets its lease.
if #write > 0 then redis.call('HSET', KEYS[1], unpack(write)) end
if #over > 0 then redis.call('HDEL', KEYS[2], unpack(over)) end
local lease = string.format('%.0f ', now + ARGV[4]) .. ARGV[2] .. ' ' .. ARGV[3]
redis.call('HSET', KEYS[2], ARGV[1], lease)
reply[#reply + 1] = ARGV[1]
reply[#reply + 1] = lease
return reply
