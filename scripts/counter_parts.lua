-- counter_parts.lua: which sums of buckets are spread, or on their way.
--
-- KEYS     hc:{n}:h of each bucket
-- Returns  their keys
-- It writes nothing. O(such sums).

local out = {}
for _, bucket in ipairs(KEYS) do
  for _, key in ipairs(redis.call('HKEYS', bucket)) do out[#out + 1] = key end
end
return out
