-- counter_steps.lua: the time buckets of a unique. Other scripts include this file; it does not run by itself.
--
-- Each time bucket has a key with its registers. The list of time buckets is a sorted set of step:index, scored by
-- the time when the bucket expires.

-- stepKey returns the key of a time bucket's registers, in the slot of the list.
local function stepKey(list, name)
  local tag, key = string.match(list, '^(hc:{n%d+}:v)(:.*)$')
  return tag .. name .. key
end

-- dropSteps deletes all time buckets of a counter.
local function dropSteps(list)
  local names = redis.call('ZRANGE', list, 0, -1)
  for _, name in ipairs(names) do redis.call('UNLINK', stepKey(list, name)) end
  if #names > 0 then redis.call('UNLINK', list) end
end
