-- counter_limit.lua: judge a call on a limit as package counter/limit does, whose documentation has the three
-- algorithms.
--
-- KEYS[1]  hc:limit:<algorithm>:<window>:<key>, the state:
--          fixed, sliding: string 'start last this': the start of the newest window, the cost permitted in the window
--          before it, and in it
--          log: list, oldest first, of 'at cost sum': each permitted call, and the running sum including it
-- ARGV[1]  fixed, sliding or log   ARGV[2]  window, ms   ARGV[3]  limit   ARGV[4]  cost
-- Returns  1: permitted, 0: refused; the remaining cost; ms until the call would be permitted, or until the whole limit
--          is available again
-- A refused call writes nothing. A permitted call costs each time it runs. The key expires when its state no longer
-- affects any call. O(1); log: O(log n), plus the expired entries that it deletes.

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local key, algorithm = KEYS[1], ARGV[1]
local window, limit, cost = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])

-- share returns a * b / c, rounded down, and the remainder. Numbers have only 53 bits, so it divides like on paper: a
-- and c are under 2^40, and b, under 2^36, is taken in three digits of 12 bits. The result is under 2^53.
local function share(a, b, c)
  local quotient, rest = 0, 0
  for _, unit in ipairs({16777216, 4096, 1}) do
    local part = rest * 4096 + a * (math.floor(b / unit) % 4096)
    rest = part % c
    quotient = quotient * 4096 + (part - rest) / c
  end
  return quotient, rest
end

-- windows judges a call on a fixed or sliding limit.
local function windows()
  local start, last, this = string.match(redis.call('GET', key) or '0 0 0', '^(%d+) (%d+) (%d+)$')
  start, last, this = tonumber(start), tonumber(last), tonumber(this)
  local begin = now - now % window
  if begin > start then -- a clock that goes back stays in the newest window
    last = begin == start + window and this or 0
    start, this = begin, 0
  end
  local before = 0 -- the weighted cost of the window before
  local stop = start + window
  if algorithm == 'sliding' then
    local whole, rest = share(last, window - math.max(now - start, 0), window)
    before = rest > 0 and whole + 1 or whole
  end
  if before + this + cost <= limit then
    this = this + cost
    if algorithm == 'sliding' then stop = stop + window end
    redis.call('SET', key, string.format('%.0f %.0f %.0f', start, last, this), 'PX', string.format('%.0f', stop - now))
    return {1, limit - before - this, stop - now}
  end
  if algorithm == 'sliding' then
    local room = limit - cost - this
    if room >= 0 then
      stop = stop - share(room, window, last)
    elseif limit - cost < this then
      local left = share(limit - cost, window, this)
      stop = stop + window - left
    end
  end
  return {0, math.max(limit - before - this, 0), stop - now}
end

-- entry returns the time, cost and running sum of an entry of the log.
local function entry(place)
  local found = redis.call('LRANGE', key, place, place)[1]
  if not found then return nil end
  local at, price, sum = string.match(found, '^(%d+) (%d+) (%d+)$')
  return tonumber(at), tonumber(price), tonumber(sum)
end

-- first returns the index of the first entry from low to high that fits, by binary search: all entries after it fit,
-- too.
local function first(low, high, fits)
  while low < high do
    local middle = math.floor((low + high) / 2)
    if fits(entry(middle)) then high = middle else low = middle + 1 end
  end
  return low
end

-- expiry returns the time from which what was permitted at a time no longer counts: times are rounded down, so two that
-- differ by exactly a window may be less than a window apart.
local function expiry(at) return at + window + 1 end

-- log judges a call on a limit with the algorithm log.
local function log()
  local size, at, gone, sum = redis.call('LLEN', key), now, 0, 0
  local young = 0
  if size > 0 then
    local newest, _, total = entry(-1)
    at, sum = math.max(now, newest), total
    local function counts(when) return expiry(when) > at end
    if not counts(entry(0)) then young = first(1, size, counts) end
    gone = sum
    if young < size then
      local _, price, with = entry(young)
      gone = with - price
    end
  end
  local used = sum - gone
  if used + cost > limit then
    local need = gone + used + cost - limit -- the entries up to this sum have to expire first
    local when = entry(first(young, size - 1, function(_, _, with) return with >= need end))
    return {0, math.max(limit - used, 0), expiry(when) - now}
  end
  if young > 0 then redis.call('LTRIM', key, young, -1) end
  redis.call('RPUSH', key, string.format('%.0f %.0f %.0f', at, cost, used > 0 and sum + cost or cost))
  local ends = expiry(at) - now
  redis.call('PEXPIRE', key, string.format('%.0f', ends))
  return {1, limit - used - cost, ends}
end

return algorithm == 'log' and log() or windows()
