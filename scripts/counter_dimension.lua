-- counter_dimension.lua: read the counts of one dimension of a sum.
--
-- KEYS     hc:{n}:c and the counts; in front hc:{n}:c, :s, :d and :t, the counts since the checkpoint and those of the
--          checkpoint
-- ARGV     the counter's key; the dimension
-- Returns  its state or ""; 1 if PostgreSQL has no other counts; its field of hc:{n}:t; a list of values and counts of
--          the checkpoint, where the empty value has "shared-count values"; the list since then. In front perhaps "lost"
-- It writes nothing. O(values of all dimensions).
--#include counter_front.lua
--#include counter_found.lua

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

local inFront = #KEYS > 2
local state, alone = found(inFront, ARGV[1])
if not state then return 'lost' end
if not inFront then return {state, alone, '', {}, list(KEYS[2])} end
local earlier = redis.call('HGET', KEYS[3], ARGV[1]) == 'x' -- then the checkpoint has an earlier incarnation
return {state, alone, redis.call('HGET', KEYS[4], ARGV[1]) or '', earlier and {} or list(KEYS[6]), list(KEYS[5])}
