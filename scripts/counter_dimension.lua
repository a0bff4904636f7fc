-- counter_dimension.lua: read what a sum counted under one dimension.
--
-- KEYS     hc:{n}:c, hc:{n}:s; then what it counted; in front instead hc:{n}:d, hc:{n}:t and what is not persisted of
--          the epoch of even and of odd number
-- ARGV     its key; the dimension
-- Returns  its state or ""; a list of values and counts, of the empty value "other kept". In front its state or ""; 1 when
--          PostgreSQL has the counts of an earlier life at most; generation; epoch; that of the cut that is on its way, or
--          0; its list; the list of the running epoch. Or "lost".
-- It writes nothing. O(values of all dimensions).
--#include counter_front.lua

local function list(key)
  local all, out, prefix = redis.call('HGETALL', key), {}, ARGV[2] .. ':'
  for i = 1, #all, 2 do
    if string.sub(all[i], 1, #prefix) == prefix then
      out[#out + 1] = string.sub(all[i], #prefix + 1)
      out[#out + 1] = all[i + 1]
    end
  end
  return out
end

local state = redis.call('HGET', KEYS[1], ARGV[1]) or ''
if #KEYS == 3 then return {state, list(KEYS[3])} end
local f = front(KEYS[2])
if not f then return 'lost' end
local died, diedBefore = redis.call('HGET', KEYS[3], ARGV[1]) == 'x', redis.call('HGET', KEYS[4], ARGV[1]) == 'x'
return {state, (died or diedBefore) and 1 or 0, string.format('%.0f', f.generation), string.format('%.0f', f.epoch),
  redis.call('HGET', KEYS[2], 'taken') or '0', died and {} or list(KEYS[7 - f.parity]), list(KEYS[4 + f.parity])}
