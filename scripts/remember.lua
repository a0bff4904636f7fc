-- remember.lua: write ended minutes of pages of one bucket, and fold them into days.
--
-- KEYS[1…n] {b}:x:<page>  strings: 14 bytes per minute in which the count changed: the minute
--           (4; since the Unix epoch), the greatest count (5), the last count (5)
-- KEYS[n+1…n+v] {b}:y:<hour>:<page>  hashes: minute (4 bytes) and writer -> arrivals and their
--           registers, see minutes.AppendVisits
-- then with days, for each of these: {b}:d:<page>  see below; then for each hash
--           {b}:v:<day>:<page>  the registers of its day; and {b}:v, which is used and removed
-- ARGV[1]  expiry of the keys, seconds   ARGV[2]  how many bytes of a string are kept
-- ARGV[3]  n   ARGV[4]  v   ARGV[5]  how many days are kept; 0: none
-- then per string the bytes to append and the area at the end of the minute (7), see present in page.lua; then per
-- hash a field and a value
-- Returns  1.
-- Safe to repeat: two copies of a minute are one, for readers and for days. A string is cut only when
-- it is a quarter longer than ARGV[2], so that it is cut rarely. O(minutes).
--
-- {b}:d:<page> is a string: the day of the last minute (3), and of that day: up to which minute counts are in it (4),
-- the last count (5) and the greatest one (5), the areas of the page's former lives (7) and of this one (7), arrivals
-- (5), visitors (5); then the day before it (3; 0: none), and from byte 45 on the days that are over, see
-- minutes.AppendPast. What comes later than a minute of a later day counts on that day (arrivals) or not (counts).
-- Arrivals of a day that has not begun by the clock of this server count on the running one.
local seconds, most, n, v, keep = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local dayForm, dayHead = '>I3I4I5I5I7I7I5I5I3', 44
local registersFor = 2 * 86400 -- seconds
-- today is the running day by the clock of this server. A clock may be corrected by a minute.
local today = math.floor((redis.call('TIME')[1] + 60) / 86400)

local function varint(value)
  local text = ''
  while value >= 128 do
    text = text .. string.char(128 + value % 128)
    value = math.floor(value / 128)
  end
  return text .. string.char(value)
end

-- number returns the varint at a place, and the place after it.
local function number(text, at)
  local sum, unit = 0, 1
  while true do
    local c = string.byte(text, at) or 0
    at, sum, unit = at + 1, sum + c % 128 * unit, unit * 128
    if c < 128 then return sum, at end
  end
end

local function readDay(key)
  local text = redis.call('GET', key)
  local d = {key = key, day = 0, till = 0, last = 0, max = 0, base = 0, area = 0, joins = 0, visitors = 0, before = 0,
    past = ''}
  if not text then return d end
  if #text < dayHead or string.byte(text) > 0 then redis.call('HLEN', key) end -- fails: it is another program's
  d.day, d.till, d.last, d.max, d.base, d.area, d.joins, d.visitors, d.before = struct.unpack(dayForm, text)
  d.past = string.sub(text, dayHead + 1)
  return d
end

-- forget drops the days before oldest.
local function forget(d, oldest)
  local at, day = 1, 0
  while at <= #d.past do
    local more, after = number(d.past, at)
    day = day + more
    if day >= oldest then
      if at > 1 then d.past = varint(day) .. string.sub(d.past, after) end
      return
    end
    at = after
    for _ = 1, 5 do at = select(2, number(d.past, at)) end
  end
  d.past, d.before = '', 0
end

-- begin ends the day before, unless it is day or later.
local function begin(d, day)
  if day <= d.day then return end
  if d.max > 0 or d.joins > 0 then
    local sum = d.base + d.area + d.last * 60000 * ((d.day + 1) * 1440 - d.till)
    for _, f in ipairs({d.day - d.before, d.max, math.floor(sum / 60000 + 0.5), d.joins, d.visitors, d.last}) do
      d.past = d.past .. varint(f)
    end
    d.before = d.day
  end
  forget(d, day - keep)
  d.day, d.till, d.max, d.base, d.area, d.joins, d.visitors, d.new = day, day * 1440, d.last, 0, 0, 0, 0, true
end

local function writeDay(d)
  local head = struct.pack(dayForm, d.day, d.till, d.last, d.max, d.base, d.area, d.joins, d.visitors, d.before)
  if d.new then redis.call('SET', d.key, head .. d.past) else redis.call('SETRANGE', d.key, 0, head) end
  redis.call('EXPIRE', d.key, (keep + 2) * 86400)
end

-- addMinute adds a minute to a string, and returns the length of that. The last one may be the same minute, see
-- foldCount.
local function addMinute(key, entry)
  local last = redis.call('GETRANGE', key, -14, -1)
  if string.sub(last, 1, 4) ~= string.sub(entry, 1, 4) then return redis.call('APPEND', key, entry) end
  local minute, most, users = struct.unpack('>I4I5I5', last)
  local _, more, is = struct.unpack('>I4I5I5', entry)
  entry = struct.pack('>I4I5I5', minute, math.max(most, more), math.max(users, is))
  return redis.call('SETRANGE', key, redis.call('STRLEN', key) - 14, entry)
end

local function foldCount(key, entry)
  local minute, max, last, area = struct.unpack('>I4I5I5I7', entry)
  local day = math.floor(minute / 1440)
  local d = readDay(key)
  begin(d, day)
  -- A minute in which the last user left comes once more if somebody was back in it. That copy has users.
  local older = minute + 1 == d.till and last < d.last
  if day == d.day and minute + 1 >= d.till and not older then
    if 2 * area < d.area then
      d.base = d.base + d.area -- the page was forgotten, and began anew
    else
      area = math.max(area, d.area)
    end
    d.max, d.area, d.last, d.till = math.max(d.max, max), area, last, minute + 1
    writeDay(d)
  end
end

local function foldVisits(key, registers, spare, field, value)
  local day = math.floor(struct.unpack('>I4', field) / 1440)
  local joins, at = number(value, 1)
  local d = readDay(key)
  -- The clock of the process may be ahead, and no day may end for the others because of that.
  begin(d, math.min(day, today))
  d.joins = d.joins + joins
  if day == d.day and at <= #value then
    redis.call('SET', spare, string.sub(value, at))
    redis.call('PFMERGE', registers, spare)
    redis.call('UNLINK', spare)
    redis.call('EXPIRE', registers, registersFor)
    d.visitors = redis.call('PFCOUNT', registers)
  end
  writeDay(d)
end

for k = 1, n + v do -- with foreign data the script fails here, before it writes
  if k <= n then redis.call('STRLEN', KEYS[k]) else redis.call('HLEN', KEYS[k]) end
  if keep > 0 then readDay(KEYS[n + v + k]) end
end
for k = 1, n do
  if addMinute(KEYS[k], string.sub(ARGV[5 + k], 1, 14)) > most + most / 4 then
    redis.call('SET', KEYS[k], redis.call('GETRANGE', KEYS[k], -most, -1))
  end
  redis.call('EXPIRE', KEYS[k], seconds)
  if keep > 0 then foldCount(KEYS[n + v + k], ARGV[5 + k]) end
end
for k = n + 1, n + v do
  local field, value = ARGV[2 * k - n + 4], ARGV[2 * k - n + 5]
  local new = redis.call('HSET', KEYS[k], field, value) == 1
  redis.call('EXPIRE', KEYS[k], seconds)
  -- A day would count the second copy of a process's minute again.
  if new and keep > 0 then foldVisits(KEYS[n + v + k], KEYS[n + 2 * v + k], KEYS[#KEYS], field, value) end
end
return 1
