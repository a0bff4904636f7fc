-- shards.lua: which shard of a partition, a hash, holds a member. Other scripts include
-- this file; it does not run by itself.
--
-- The number of shards of a partition follows the number of its members, see resize.lua.
-- It changes by one at a time, so a step splits or merges one shard only.

-- within returns the smallest power of two that is at least n.
local function within(n)
  local size = 1
  while size < n do size = 2 * size end
  return size
end

-- spread returns a number that depends on the user in a member's field.
local function spread(field)
  local a, b, c, d, e, f, g, h = string.byte(field, 1, 8)
  return ((a * 256 + b) * 256 + c) * 256 + d + ((e * 256 + f) * 256 + g) * 256 + h
end
