-- counter_set.lua: sets of members that use little memory. Other scripts include this file; it does not run by itself.
--
-- A set is one Redis hash. A member is the first 14 characters of a hash of its name. Members are distributed over
-- parts; each part is a field of the Redis hash, whose name is the part's index, and which has its members one after
-- another. The field 'parts' has the number of parts; without it there is one. The set grows by linear hashing, one
-- part at a time, so a part has about 96 members at most and no call moves more.

local WIDTH, FILL = 14, 96

local digits -- the values of the 64 characters; made when needed, because most runs do not

-- bits returns the number of 24 bits in the four characters at an index.
local function bits(hash, at)
  if not digits then
    local alphabet = 'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_'
    digits = {}
    for i = 1, #alphabet do digits[string.byte(alphabet, i)] = i - 1 end
  end
  local a, b, c, d = string.byte(hash, at, at + 3)
  return ((digits[a] * 64 + digits[b]) * 64 + digits[c]) * 64 + digits[d]
end

-- openSet returns the set in key, or with fresh an empty one that will replace it. top is the least power of two that
-- is not less than the number of parts.
local function openSet(key, fresh)
  local set = {key = key, fresh = fresh, parts = 1, top = 1, text = {}, dirty = {}}
  if not fresh then set.parts = tonumber(redis.call('HGET', key, 'parts') or 1) end
  while set.top < set.parts do set.top = set.top * 2 end
  return set
end

-- partText returns the members of a part, read once.
local function partText(set, part)
  local text = set.text[part]
  if not text then
    text = not set.fresh and redis.call('HGET', set.key, part) or ''
    set.text[part] = text
  end
  return text
end

-- place returns the part that a member belongs to, the part's text, and the index of the member in it or nil.
local function place(set, hash)
  local n = bits(hash, 1)
  local part = n % set.top
  if part >= set.parts then part = n % (set.top / 2) end
  local text = partText(set, part)
  local at = string.find(text, hash, 1, true)
  while at and at % WIDTH ~= 1 do at = string.find(text, hash, at + 1, true) end
  return part, text, at
end

local function put(set, part, text)
  set.text[part], set.dirty[part] = text, true
end

-- divide adds a part, and moves members to it from the part that they shared.
local function divide(set)
  local new = set.parts
  set.parts, set.divided = new + 1, true
  if set.parts > set.top then set.top = set.top * 2 end
  local old = new - set.top / 2
  local text, stays, goes = partText(set, old), {}, {}
  for at = 1, #text, WIDTH do
    local list = bits(text, at) % set.top == new and goes or stays
    list[#list + 1] = string.sub(text, at, at + WIDTH - 1)
  end
  put(set, old, table.concat(stays))
  put(set, new, table.concat(goes))
end

-- join and leave add or remove a member, and report whether the set changed. size is the number of members before.
local function join(set, hash, size)
  local part, text, at = place(set, hash)
  if at then return false end
  put(set, part, text .. hash)
  if size + 1 > set.parts * FILL then divide(set) end
  return true
end

local function leave(set, hash)
  local part, text, at = place(set, hash)
  if not at then return false end
  put(set, part, string.sub(text, 1, at - 1) .. string.sub(text, at + WIDTH))
  return true
end

-- keepSet writes the changed parts to Redis.
local function keepSet(set)
  if set.fresh then redis.call('UNLINK', set.key) end
  for part in pairs(set.dirty) do
    if set.text[part] ~= '' then
      redis.call('HSET', set.key, part, set.text[part])
    elseif not set.fresh then
      redis.call('HDEL', set.key, part)
    end
  end
  if set.divided then redis.call('HSET', set.key, 'parts', set.parts) end
end
