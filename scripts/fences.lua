-- fences.lua: what a bucket knows about the partitions' owners. Other scripts include
-- this file; it does not run by itself.
--
-- {b}:f is a string with 15 bytes for each partition: the epoch of its owner, the
-- sequence of the last change here, and how many counts of that change are written in
-- this bucket. It is one string, because searching a hash with 271 fields is slow, and
-- because the fences of many partitions are read and written with one command each.

local fenceForm, fenceSize = '>I6I6I3', 15

-- openFences reads the fences of partitions from first to last.
local function openFences(key, first, last)
  local at = string.format('%d', first * fenceSize)
  local text = redis.call('GETRANGE', key, at, string.format('%d', (last + 1) * fenceSize - 1))
  return {key = key, at = at, first = first, text = text, read = 0}
end

-- fenceOf returns epoch, sequence and done of partition p; each is 0 if p has none.
local function fenceOf(fences, p)
  local at = (p - fences.first) * fenceSize
  if #fences.text < at + fenceSize then return 0, 0, 0 end
  return struct.unpack(fenceForm, fences.text, at + 1)
end

-- putFence notes the new fence of partition p, 15 bytes. The partitions come in their order.
local function putFence(fences, p, fence)
  local at, n = (p - fences.first) * fenceSize, #fences
  if at < fences.read then
    fences[n] = fence -- the second of one partition
    return
  end
  local between = string.sub(fences.text, fences.read + 1, at)
  fences[n + 1] = between .. string.rep('\0', at - fences.read - #between)
  fences[n + 2] = fence
  fences.read = at + fenceSize
end

-- writeFences writes the new fences.
local function writeFences(fences)
  if #fences > 0 then redis.call('SETRANGE', fences.key, fences.at, table.concat(fences)) end
end
