-- fences.lua: what a bucket knows about the partitions' owners. Other scripts include
-- this file; it does not run by itself.
--
-- {b}:f is a string: 16 bytes of seal, then 6 bytes for each partition, the epoch of its
-- owner. Each claim puts another seal there. So a caller that has once found its epochs
-- valid need not have them looked at again while the seal is the same.

local sealSize, epochSize = 16, 6

-- epochOf returns the epoch of partition p, 0 if it has none. fences is all of {b}:f.
local function epochOf(fences, p)
  local at = sealSize + p * epochSize
  if #fences < at + epochSize then return 0 end
  return (struct.unpack('>I6', fences, at + 1))
end
