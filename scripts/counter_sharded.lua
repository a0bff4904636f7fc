-- counter_sharded.lua: which sums of buckets are sharded.
--
-- KEYS     of each bucket hc:{n}:h and hc:{n}:c
-- Returns  of each such sum its key and its record; "" instead of one that was evicted
-- It writes nothing. O(such sums).

local out = {}
for i = 1, #KEYS, 2 do
  for _, key in ipairs(redis.call('HKEYS', KEYS[i])) do
    out[#out + 1] = key
    out[#out + 1] = redis.call('HGET', KEYS[i + 1], key) or ''
  end
end
return out
