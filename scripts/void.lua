-- void.lua: the incarnation of what a bucket keeps as it was published. Other scripts include
-- this file; it does not run by itself.
--
-- Redis may have come back with an older memory, and would give sequences again that had other
-- contents. Then the bucket has begun a generation, whose incarnation is the field void of {b}:s
-- (fence.lua): nothing in the bucket has a lower one.

-- incarnationOf returns that of a version, as text. is is the one that is stored, and void the field.
local function incarnationOf(is, void)
  if void and tonumber(void) > tonumber(is) then return void end
  return is
end
