-- counter_dimension.lua: read what a sum counted under one dimension.
--
-- KEYS     hc:{n}:c, hc:{n}:s; then what it counted; in front instead hc:{n}:d, hc:{n}:t and what is not persisted,
--          since the last checkpoint and in it
-- ARGV     its key; the dimension
-- Returns  its state or ""; a list of values and counts, of the empty value "other kept". In front its state or "";
--          1 when PostgreSQL has the counts of an earlier life at most; what hc:{n}:t says of it; the list of the checkpoint;
--          the list since then. Or "lost".
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
if not front(KEYS[2]) then return 'lost' end
local dirty, taken = redis.call('HGET', KEYS[3], ARGV[1]), redis.call('HGET', KEYS[4], ARGV[1])
return {state, wasDeleted(KEYS[3], KEYS[4], ARGV[1]) and 1 or 0, taken or '', dirty == 'x' and {} or list(KEYS[6]), list(KEYS[5])}
