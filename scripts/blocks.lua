-- blocks.lua: the numbers of a page, see page.lua. Other scripts include this file; it
-- does not run by itself.

local numberForms = {'>I1', '>I2', '>I3', '>I4', '>I5'}

-- blockSize returns how many partitions a block has: few, so that a page with few users
-- is small, and so many that a byte can number the blocks.
local function blockSize(partitions) return math.max(8, math.ceil(partitions / 255)) end

-- addBlock returns body with one more block, which has no users.
local function addBlock(body, size, width, blocks, name)
  local to = blocks + blocks * size * width
  return string.sub(body, 1, blocks) .. name .. string.sub(body, blocks + 1, to) .. string.rep('\0', size * width) .. string.sub(body, to + 1)
end

-- widen returns body with numbers of another width.
local function widen(body, size, width, blocks, wider)
  local parts, to = {string.sub(body, 1, blocks)}, blocks + blocks * size * width
  for at = blocks + 1, to, width do
    parts[#parts + 1] = string.rep('\0', wider - width) .. string.sub(body, at, at + width - 1)
  end
  parts[#parts + 1] = string.sub(body, to + 1)
  return table.concat(parts)
end

local find, part, char, byte = string.find, string.sub, string.char, string.byte

-- setCount sets the number of partition p to n. It returns the number that was there,
-- the new body, and its width and number of blocks. body is numbers of blocks, blocks
-- and pairs.
local function setCount(body, size, width, blocks, p, n)
  local i = p % size
  local name = char((p - i) / size)
  local block = find(body, name, 1, true)
  if not block or block > blocks then
    if n == 0 then return 0, body, width, blocks end
    body, blocks = addBlock(body, size, width, blocks, name), blocks + 1
    block = blocks
  end
  if n > 255 and n >= 256 ^ width then
    local wider = width + 1
    while n >= 256 ^ wider do wider = wider + 1 end
    body, width = widen(body, size, width, blocks, wider), wider
  end
  local first = blocks + (block - 1) * size * width + 1
  local at, had = first + i * width, nil
  if width == 1 then
    had = byte(body, at)
    if had == n then return had, body, width, blocks end
    body = part(body, 1, at - 1) .. char(n) .. part(body, at + 1)
  else
    local form = numberForms[width]
    had = struct.unpack(form, body, at)
    if had == n then return had, body, width, blocks end
    body = part(body, 1, at - 1) .. struct.pack(form, n) .. part(body, at + width)
  end
  local last = first + size * width
  if n == 0 and not find(part(body, first, last - 1), '[^%z]') then
    body = part(body, 1, block - 1) .. part(body, block + 1, first - 1) .. part(body, last)
    blocks = blocks - 1
  end
  return had, body, width, blocks
end
