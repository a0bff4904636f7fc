-- counter_steps.lua: whom a unique saw in steps of time. It is no script: it is included.
--
-- The registers of a step have a key of their own, made here from that of the list of steps, in the
-- same slot. The list is a zset of step:number, by when a step is not kept any more.

local function stepKey(list, name)
  local tag, key = string.match(list, '^(hc:{n%d+}:v)(:.*)$')
  return tag .. name .. key
end

-- dropSteps takes all steps of a counter away.
local function dropSteps(list)
  local names = redis.call('ZRANGE', list, 0, -1)
  for _, name in ipairs(names) do redis.call('UNLINK', stepKey(list, name)) end
  if #names > 0 then redis.call('UNLINK', list) end
end
