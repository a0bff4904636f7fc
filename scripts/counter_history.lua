-- counter_history.lua: read what a counter gained.
--
-- KEYS     hc:{n}:c, hc:{n}:s; then its history of the step; in front instead hc:{n}:d, hc:{n}:t and what is not
--          persisted of the epoch of even and of odd number
-- ARGV     its key
-- Returns  its state or ""; its history. In front its state or ""; 1 when PostgreSQL has the history of an earlier life
--          at most; what is not persisted, of the cut that is on its way first. Or "lost".
-- It writes nothing. O(what is kept).
--#include counter_front.lua

local state = redis.call('HGET', KEYS[1], ARGV[1]) or ''
if #KEYS == 3 then return {state, redis.call('GET', KEYS[3]) or ''} end
local f = front(KEYS[2])
if not f then return 'lost' end
local now, before = KEYS[4 + f.parity], KEYS[7 - f.parity]
local died, diedBefore = redis.call('HGET', KEYS[3], ARGV[1]) == 'x', redis.call('HGET', KEYS[4], ARGV[1]) == 'x'
return {state, (died or diedBefore) and 1 or 0, died and {} or redis.call('HGETALL', before), redis.call('HGETALL', now)}
