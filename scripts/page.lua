-- page.lua: how the counts of a page are stored. Other scripts include this file; it
-- does not run by itself.
--
-- {b}:c:<page> is a hash with few short fields. So Redis keeps it in the dense form of
-- small hashes, and a change reads and writes few bytes. The names of the fields are
-- short, since every page has them:
--   v   40 bytes: the rebuild to which the counts belong; users of this region; time of
--       their last change; incarnation and sequence of the version; incarnation and
--       decrements of this region's pair, whose increments are its decrements plus users
--   p   the pairs of the other regions, see pairs.lua
--   0 … each for 16 partitions: one byte with the width of a number, then their users in
--       order; at most 49 bytes while a partition has under 16 million users on the page
-- {b}:z is a sorted set: pages without users -> since when, in unix seconds. They expire.

local pageForm = '>I4I5I5I7I6I7I6'

-- readPage returns what v holds: rebuild, users, updated, incarnation, sequence, and
-- incarnation and decrements of the pair. It returns nil if v is missing or unreadable.
local function readPage(v)
  if not v or #v ~= 40 then return nil end
  return struct.unpack(pageForm, v)
end

local function pageValue(rebuild, users, updated, inc, seq, own, down)
  return struct.pack(pageForm, rebuild, users, updated, inc, seq, own, down)
end

-- whole returns a whole number as text, also if it is long. (Lua and Redis convert a
-- number much more slowly by themselves, since it may be a fraction.)
local function whole(n) return string.format('%d', n) end

local numberForms = {'>I1', '>I2', '>I3', '>I4', '>I5'}

-- withCount sets the number at place i of a block of 16 partitions to n. It returns the
-- new block, or nil if all its numbers are 0, and the number that was there before. text
-- is the old block, or false.
local function withCount(text, i, n)
  if not text then text = '\1' end
  local width = string.byte(text)
  if n >= 256 ^ width then
    local wider = width + 1
    while n >= 256 ^ wider do wider = wider + 1 end
    local parts = {string.char(wider)}
    for j = 2, #text, width do parts[#parts + 1] = string.rep('\0', wider - width) .. string.sub(text, j, j + width - 1) end
    text, width = table.concat(parts), wider
  end
  local at, form = 2 + i * width, numberForms[width]
  if #text < at then
    if n == 0 then return #text > 1 and text or nil, 0 end
    return text .. string.rep('\0', at - 1 - #text) .. struct.pack(form, n), 0
  end
  local had = struct.unpack(form, text, at)
  if had == n then return text, had end
  text = string.sub(text, 1, at - 1) .. struct.pack(form, n) .. string.sub(text, at + width)
  if n == 0 and not string.find(text, '[^%z]', 2) then text = nil end
  return text, had
end

-- emptied lets a page without users expire, unless it has a time to live already. (A page
-- can lose its time to live in other ways than by a user who comes, so emptied asks.)
local function emptied(key, page, empties, now, seconds)
  if redis.call('TTL', key) < 0 then redis.call('EXPIRE', key, seconds) end
  redis.call('ZADD', empties, 'NX', now, page)
end
