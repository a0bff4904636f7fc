-- fences.lua: the epochs of the partitions' owners in a bucket. Other scripts include
-- this file; it does not run by itself.
--
-- {b}:f is a string: 16 bytes of stamp, then 6 bytes for each partition, the epoch of its
-- owner. Each claim writes another stamp. So the epochs of a caller that were once found
-- valid need no further check while the stamp is the same.

local stampSize, epochSize = 16, 6

-- epochOf returns the epoch of partition p, or 0 if it has none. fences is the value of {b}:f.
local function epochOf(fences, p)
  local at = stampSize + p * epochSize
  if #fences < at + epochSize then return 0 end
  return (struct.unpack('>I6', fences, at + 1))
end
