-- fences.lua: the epochs of the partitions' owners in a bucket. Other scripts include
-- this file; it does not run by itself.
--
-- {b}:f is a string: 16 bytes of seal, then 6 bytes for each partition, the epoch of its
-- owner. Each claim writes another seal. So the epochs of a caller that were once found
-- valid need no further check while the seal is the same.

local sealSize, epochSize = 16, 6

-- epochOf returns the epoch of partition p, or 0 if it has none. fences is the value of {b}:f.
local function epochOf(fences, p)
  local at = sealSize + p * epochSize
  if #fences < at + epochSize then return 0 end
  return (struct.unpack('>I6', fences, at + 1))
end
