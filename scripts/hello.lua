-- hello.lua: a process of another region reports that its region is alive.
--
-- KEYS[1]  {c}:facts  hash: name -> value
-- KEYS[2]  {c}:regions  hash: region -> 'identity beats unix-ms'; '.self' is the identity
--                       of this region, '.out' the peers that it leaves out of totals
-- ARGV[1]  region   ARGV[2]  its identity
-- ARGV[3]  ms of silence after which another identity may take the name
-- Returns  {'ok', fact, value, …}, {'missing'} when no process of this region has
--          written its facts, or {'taken'} when another region has that name.
-- Safe to repeat. O(1).

local facts = redis.call('HGETALL', KEYS[1])
-- Facts without a region are of an import, before the first process.
if redis.call('HEXISTS', KEYS[1], 'region') == 0 then return {'missing'} end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local identity, beats, last = string.match(redis.call('HGET', KEYS[2], ARGV[1]) or '', '^(%S+) (%d+) (%d+)$')
-- last is ahead of now where the clock has gone back; the name is not held for longer than that.
if identity and identity ~= ARGV[2] and now - last < tonumber(ARGV[3]) and
  last - now < tonumber(ARGV[3]) then return {'taken'} end
redis.call('HSET', KEYS[2], ARGV[1], string.format('%s %.0f %.0f', ARGV[2], (beats or 0) + 1, now))
table.insert(facts, 1, 'ok')
return facts
