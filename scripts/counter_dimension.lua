-- counter_dimension.lua: read the counts of one dimension of a sum.
--
-- KEYS     hc:{n}:c, hc:{n}:s; then the counts. In front instead hc:{n}:d, hc:{n}:t, and the counts since the checkpoint
--          and those of the checkpoint
-- ARGV     the counter's key; the dimension
-- Returns  its state or ""; a list of values and counts, where the empty value has "shared-count values". In front its
--          state or ""; 1 if the counts in PostgreSQL, if any, are of an earlier incarnation; its field of hc:{n}:t; the
--          list of the checkpoint; the list since then. Or "lost"
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
