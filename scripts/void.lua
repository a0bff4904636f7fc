-- void.lua: the incarnation of values that a bucket stores as they are published. Other scripts
-- include this file; it does not run by itself.
--
-- After Redis has come back with older data, it would assign sequences again to other contents.
-- The bucket has then begun a generation, whose incarnation is the field void of {b}:s
-- (fence.lua): no version in the bucket has a lower incarnation.

-- incarnationOf returns the incarnation of a version, as text: the greater of the stored one, is,
-- and the field void.
local function incarnationOf(is, void)
  if void and tonumber(void) > tonumber(is) then return void end
  return is
end
