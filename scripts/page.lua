-- page.lua: how the counts of a page are stored. Other scripts include this file; it
-- does not run by itself.
--
-- {b}:c:<page> is one string, so that a change reads and writes many pages with one
-- command each. It has
--   50 bytes: the rebuild to which the counts belong, whose first byte is 0; users of this
--       region; time of their last change; incarnation and sequence of the version;
--       incarnation and decrements of this region's pair, whose increments are its
--       decrements plus users; the length of the pairs; the greatest total in the minute of
--       the last change (kept only if pages remember minutes); the width of a number; how
--       many numbers there are
--   the numbers: users by partition, each after its partition (2 bytes, the lower first), in
--       any order and without partitions that have no users; or, if that is shorter, one
--       number for every partition, in order. See numbers.lua
--   the pairs of the other regions, see pairs.lua. With days there is one more, of no region:
--       '_ 0 day area;', see present
-- A page with one user takes 53 bytes, a page with users in all of 271 partitions 321.
-- {b}:z is a sorted set: pages without users -> since when, in unix seconds. They expire.

local packBytes, unpackBytes, byte = struct.pack, struct.unpack, string.byte
local pageForm, pageHead = '>I4I5I5I7I6I7I6I2I5I1I2', 50

-- isPage reports whether text is a page, and not the data of another program.
local function isPage(text) return #text >= pageHead and byte(text) == 0 end

-- readPage returns rebuild, users, updated, incarnation, sequence, incarnation and
-- decrements of the pair, the length of the pairs, the greatest total, the width of a number and
-- how many numbers there are. It returns nil if there is no page (text is false), and fails with WRONGTYPE
-- if the key is another program's.
local function readPage(text, key)
  if not text then
    redis.call('STRLEN', key) -- MGET reports a key of another type as missing
    return nil
  end
  if not isPage(text) then redis.call('HLEN', key) end
  return unpackBytes(pageForm, text)
end

-- addMinute adds a minute to ended: unless page is nil the length of the page (2) and the page, then the 14 bytes of
-- the minute, see remember.lua, and unless page is nil the area at its end (7).
local function addMinute(ended, page, minute, most, last, area)
  if page then ended[#ended + 1] = packBytes('>I2', #page) .. page end
  ended[#ended + 1] = packBytes('>I4I5I5', minute, most, last)
  if page then ended[#ended + 1] = packBytes('>I7', area) end
end

-- remembered returns the greatest total in the running minute, in which the total changes
-- from before to after at now (in seconds). At the first change in a minute, it also adds the
-- last minute with a change to ended. most is the greatest total in that minute, and updated
-- the time of its last change; 0: there was none. A page that becomes void counts as a change, too.
local function remembered(ended, page, updated, most, before, after, now, area)
  if updated == 0 then return math.max(before, after) end
  local was = math.floor(updated / 60)
  if was < math.floor(now / 60) then
    local atEnd = page and math.max(0, area + before * 1000 * (60 * was + 59 - updated))
    addMinute(ended, page, was, math.max(most, before), before, atEnd)
    most = before
  end
  return math.max(most, before, after)
end

-- present returns the area of a page: the sum over its users of the time that they were present on the day of now, in
-- milliseconds, up to the end of that second. area is that of the last change, at updated (in seconds); the total was
-- before since then, and changes by delta at so many milliseconds of the second now. An older release leaves the area
-- as it is, so it then lacks time.
local function present(area, updated, before, delta, now, millis)
  local since, midnight = updated + 1, now - now % 86400
  if since <= midnight then area, since = 0, midnight end
  return math.max(0, area + before * 1000 * (now + 1 - since) + delta * (1000 - millis))
end

-- cutArea returns the area of a page that was changed at updated, its text without the area, and the length of its
-- pairs without the area. No region's pair has the incarnation 0. The area of another day is void: an older release
-- has changed the page since.
local areaMark, areaForm, areaSize = '_ 0 ', '_ 0 %05d %015d;', 26
local part, format = string.sub, string.format
local function areaText(area, updated) return format(areaForm, math.floor(updated / 86400), area) end
local function cutArea(text, length, updated)
  if length < areaSize then return 0, text, length end
  local at, rest = #text + 1 - areaSize, part(text, 1, -areaSize - 1)
  if part(text, at, at + 3) ~= areaMark then
    at = string.find(text, areaMark, #text + 1 - length, true) -- an older release has appended a region's pair
    if not at then return 0, text, length end
    rest = part(text, 1, at - 1) .. part(text, at + areaSize)
  end
  local day, area = tonumber(part(text, at + 4, at + 8)), tonumber(part(text, at + 10, at + 24))
  if day ~= math.floor(updated / 86400) then area = 0 end
  return area or 0, rest, length - areaSize
end

-- pageCounts returns the beginning of the text of a page, up to the length of the pairs.
local function pageCounts(rebuild, users, updated, inc, seq, own, down)
  return packBytes('>I4I5I5I7I6I7I6', rebuild, users, updated, inc, seq, own, down)
end

-- pairsOf returns the pairs of the other regions, which have length bytes.
local function pairsOf(text, length) return string.sub(text, #text + 1 - length) end

-- whole returns a whole number as text, without an exponent. (Lua and Redis convert a
-- number much more slowly by themselves, since it may be a fraction.)
local function whole(n) return string.format('%d', n) end

-- emptied lets a page without users expire, unless it has an expiry already. (A page can lose
-- its expiry in other ways than by a new user, so emptied asks Redis.)
local function emptied(key, page, empties, now, seconds)
  if redis.call('TTL', key) < 0 then redis.call('EXPIRE', key, seconds) end
  redis.call('ZADD', empties, 'NX', now, page)
end
