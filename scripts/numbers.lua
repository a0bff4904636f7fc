-- numbers.lua: changes of the numbers of a page, see page.lua. Other scripts include this
-- file; it does not run by itself. They set partitions to the number of partitions.
--
-- Lua hashes every byte of every string that it makes. So the page is not rebuilt for each
-- number: its pieces are collected, and concatenated once. The functions work on one page at
-- a time, from openPage to pageText. They are fastest if the partitions come in order.

local part, char, find = string.sub, string.char, string.find
local numberForms = {'>I1', '>I2', '>I3', '>I4', '>I5'}

-- text has the page's numbers from origin to before stop, then the rest. dense: there is a
-- number for each partition; otherwise each number follows its partition. The changed text up
-- to from is in pieces, which has count elements. numbers is how many numbers the page has,
-- and last is the partition that was changed last.
local text, origin, stop, dense, from, pieces, count, width, numbers, last

local function begin(page, at, wide, n, full)
  text, origin, from, pieces, count, width, numbers, dense, last = page, at, at, {}, 0, wide, n, full, -1
  stop = origin + numbers * (dense and width or 2 + width)
end

local function openPage(page, at, wide, n) begin(page, at, wide, n, n == partitions) end

-- pageText returns head and the changed page from origin on.
local function pageText(head)
  if count == 2 then return head .. pieces[1] .. pieces[2] .. part(text, from) end
  return head .. table.concat(pieces, '', 1, count) .. part(text, from)
end

-- layOut rewrites the numbers in another width or form.
local function layOut(wide, full)
  begin(pageText(''), 1, width, numbers, dense)
  local list, form = {}, numberForms[wide]
  if full then
    for p = 1, partitions do list[p] = string.rep('\0', wide) end
  end
  for i = 0, numbers - 1 do
    local p, at = i, 1 + i * width
    if not dense then p, at = unpackBytes('<I2', text, 1 + i * (2 + width)) end
    local n = unpackBytes(numberForms[width], text, at)
    if full then
      list[p + 1] = packBytes(form, n)
    elseif n > 0 then
      list[#list + 1] = packBytes('<I2', p) .. packBytes(form, n)
    end
  end
  begin(table.concat(list) .. part(text, stop), 1, wide, #list, full)
end

-- place returns where the number of partition p is in a list that is not dense, or nil.
local function place(name)
  local at, stride = origin - 1, 2 + width
  repeat at = find(text, name, at + 1, true) until not at or (at - origin) % stride == 0
  return at and at < stop and at + 2 or nil
end

-- setCount sets the number of partition p to n, and returns the former number.
local function setCount(p, n)
  if p == last then begin(pageText(''), 1, width, numbers, dense) end
  if n > 255 and n >= 256 ^ width then
    local wide = width + 1
    while n >= 256 ^ wide do wide = wide + 1 end
    layOut(wide, dense)
  end
  local is = width == 1 and char(n) or packBytes(numberForms[width], n)
  local first
  local after, more = stop, 0
  if dense then
    first = origin + p * width
  else
    local name = char(p % 256, (p - p % 256) / 256)
    first = place(name)
    if not first then
      if n == 0 then return 0 end
      is, more = name .. is, 1
    end
  end
  local had = 0
  if first then
    had = unpackBytes(numberForms[width], text, first)
    if had == n then return had end
    after = first + width
    if n == 0 and not dense then first, is, more = first - 2, '', -1 end
  else
    first = stop
  end
  if first < from then -- the number is before the one that was changed last
    begin(pageText(''), 1, width, numbers, dense)
    return setCount(p, n)
  end
  pieces[count + 1], pieces[count + 2] = part(text, from, first - 1), is
  count, from, numbers, last = count + 2, after, numbers + more, p
  return had
end

-- setOne does the same in the usual case, in a fifth of the time: it sets one number of a page
-- that has numbers of one byte and no pairs. It returns the former number, the text of the
-- numbers after the change, and how many there are. It returns nil if the case is another one,
-- or if another form would suit the page. users is how many users the page had; counts has the
-- bytes of the partition at at.
local longest = partitions / 3 -- a list of more numbers of one byte is longer than the dense form
local function setOne(page, n, users, p, counts, at, is)
  local first = pageHead + 1
  if n == partitions then
    local had = byte(page, first + p)
    if 2 * (users + is - had) < longest then return nil end
    return had, part(page, first, pageHead + p) .. char(is) .. part(page, first + p + 1), n
  end
  local name = part(counts, at, at + 1)
  local place = find(page, name, first, true)
  if not place then
    if is == 0 or n + 1 > longest then return nil end
    return 0, part(page, first) .. name .. char(is), n + 1
  end
  if (place - first) % 3 > 0 then return nil end
  local had = byte(page, place + 2)
  if is == 0 then return had, part(page, first, place - 1) .. part(page, place + 3), n - 1 end
  return had, part(page, first, place + 1) .. char(is) .. part(page, place + 3), n
end

-- closePage chooses the form that suits a page with that many users. It returns the width of
-- the page's numbers and how many numbers it has.
local function closePage(users)
  local most = partitions * width / (2 + width) -- a list of more numbers is longer than the dense form
  if not dense and numbers > most then
    layOut(width, true)
  elseif dense and 2 * users < most then
    layOut(width, false)
  end
  return width, numbers
end
