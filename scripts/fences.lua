-- fences.lua: what a bucket knows about the partitions' owners. Other scripts include
-- this file; it does not run by itself.
--
-- {b}:f is a string with 15 bytes for each partition: the epoch of its owner, the
-- sequence of the last change here, and how many counts of that change are written in
-- this bucket. It is one string because searching a hash with 271 fields is slow.

local fenceForm, fenceSize = '>I6I6I3', 15

-- fenceOf returns epoch, sequence and done of partition p; each is 0 if p has none.
local function fenceOf(text, p)
  if #text < (p + 1) * fenceSize then return 0, 0, 0 end
  return struct.unpack(fenceForm, text, p * fenceSize + 1)
end

local function setFence(key, p, epoch, sequence, done)
  redis.call('SETRANGE', key, string.format('%d', p * fenceSize), struct.pack(fenceForm, epoch, sequence, done))
end
