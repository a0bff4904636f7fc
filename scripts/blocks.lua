-- blocks.lua: how the numbers of a page change, see page.lua. Other scripts include this
-- file; it does not run by itself.
--
-- Lua hashes every byte of every text that it makes. So a page is not made anew for each
-- number: its pieces are noted, and put together once. The functions work on one page at
-- a time, from openPage to closePage and pageText, and its partitions must come in their
-- order. The script says in partitions how many of them there are.

local part, byte, char, find = string.sub, string.byte, string.char, string.find
local numberForms = {'>I1', '>I2', '>I3', '>I4', '>I5'}

-- size is how many partitions a block has: few, so that a page with few users is small,
-- and so many that a byte can number the blocks.
local size = math.max(8, math.ceil(partitions / 255))

-- text has the page's numbers of blocks from origin on, then the blocks and the rest. Up to
-- from it stands, as changed, in pieces, of which there are count. lost has the numbers of
-- blocks in which a number became 0; nil: there are none.
local text, origin, from, pieces, count, width, blocks, lost

local function openPage(page, at, w, b)
  text, origin, from, pieces, count, width, blocks, lost = page, at, at, {}, 0, w, b, nil
end

-- pageText returns the page as it is now, from origin on, after head.
local function pageText(head)
  if count == 2 then return head .. pieces[1] .. pieces[2] .. part(text, from) end
  return head .. table.concat(pieces, '', 1, count) .. part(text, from)
end

-- continue begins anew with what the page has become.
local function continue(body, w, b)
  text, origin, from, count, width, blocks = body, 1, 1, 0, w, b
end

-- addBlock adds a block without users, in its place.
local function addBlock(number)
  local body, first = pageText(''), 1
  while first <= blocks and byte(body, first) < number do first = first + 1 end
  local at = blocks + (first - 1) * size * width
  continue(part(body, 1, first - 1) .. char(number) .. part(body, first, at) .. string.rep('\0', size * width) .. part(body, at + 1), width, blocks + 1)
end

-- widen gives every number of the page a width for numbers up to n.
local function widen(n)
  local body, wider = pageText(''), width + 1
  while n >= 256 ^ wider do wider = wider + 1 end
  local to = blocks + blocks * size * width
  local all, more = {part(body, 1, blocks)}, string.rep('\0', wider - width)
  for at = blocks + 1, to, width do all[#all + 1] = more .. part(body, at, at + width - 1) end
  all[#all + 1] = part(body, to + 1)
  continue(table.concat(all), wider, blocks)
end

-- setCount sets the number of partition p to n, and returns the number that was there.
local function setCount(p, n)
  local i = p % size
  local name = char((p - i) / size)
  local block = find(text, name, origin, true)
  if not block or block >= origin + blocks then
    if n == 0 then return 0 end
    addBlock(byte(name))
    block = find(text, name, origin, true)
  end
  if n > 255 and n >= 256 ^ width then
    widen(n)
    block = find(text, name, origin, true)
  end
  local at = origin + blocks + ((block - origin) * size + i) * width
  local form, second = numberForms[width], at < from -- the second count of this partition
  local had = struct.unpack(form, second and pieces[count] or text, second and 1 or at)
  if had == n then return had end
  if not second then
    pieces[count + 1] = part(text, from, at - 1)
    count, from = count + 2, at + width
  end
  pieces[count] = width == 1 and char(n) or struct.pack(form, n)
  if n == 0 then
    lost = lost or {}
    lost[#lost + 1] = name
  end
  return had
end

-- closePage drops blocks without users. It returns the width of the page's numbers and how
-- many blocks it has.
local function closePage()
  for _, name in ipairs(lost or {}) do
    local body, step = pageText(''), size * width
    local block = find(body, name, 1, true)
    if block and block <= blocks then
      local first = blocks + (block - 1) * step + 1
      if not find(part(body, first, first + step - 1), '[^%z]') then
        body, blocks = part(body, 1, block - 1) .. part(body, block + 1, first - 1) .. part(body, first + step), blocks - 1
      end
    end
    continue(body, width, blocks)
  end
  return width, blocks
end
