-- counter_far.lua: what a counter has of other regions. It is no script: it is included, after counter_number.lua.
--
-- The record of a counter has its total. Its field in hc:{n}:f says which parts of that are not this life's of this
-- region: 'died emptied', then ' region/life/sequence/value/at/base' for each part. A sum has a part of each
-- life of each region, and counts value less base; base is what a reset took away, as the part was at its sequence at.
-- A set and a unique have one of each other region, of its newest life. Package shares is the same in Go. In front of
-- the parts stands ' ~' while this life of this region was made by hearing alone: it has changed nothing itself.

local PARTS = 100 -- of one counter; a life beyond is not counted
local LOGGED = 4096 -- counters in the log of a bucket; who is further behind is told all

local function partName(kind, region, life)
  return kind == 'sum' and region .. '/' .. string.format('%.0f', life) or region
end

local function addPart(far, name, p)
  far.list[#far.list + 1] = p
  far.by[name] = p
end

-- eachPart calls with the parts of a text.
local function eachPart(text, with)
  for region, life, sequence, value, at, base in string.gmatch(text, ' ([^/ ]+)/(%d+)/(%d+)/(%-?%d+)/(%d+)/(%-?%d+)') do
    with({region = region, life = tonumber(life), sequence = tonumber(sequence), value = value, at = tonumber(at), base = base})
  end
end

-- readFar reads the field of a counter of that kind; none: false or nil.
local function readFar(text, kind)
  local far = {died = 0, emptied = 0, list = {}, by = {}}
  if not text then return far end
  local died, emptied, parts = string.match(text, '^(%d+) (%d+)(.*)$')
  far.died, far.emptied, far.heard = tonumber(died), tonumber(emptied), string.sub(parts, 1, 2) == ' ~'
  eachPart(parts, function(p) addPart(far, partName(kind, p.region, p.life), p) end)
  return far
end

local function partText(p)
  return ' ' .. p.region .. '/' .. string.format('%.0f/%.0f/', p.life, p.sequence) .. p.value .. '/' .. string.format('%.0f/', p.at) .. p.base
end

-- writeFar is the text of a field, or nil when there is nothing to say.
local function writeFar(far)
  local list = {}
  for _, p in ipairs(far.list) do
    if p.sequence > 0 or p.at > 0 then list[#list + 1] = partText(p) end
  end
  if far.died == 0 and far.emptied == 0 and not far.heard and #list == 0 then return nil end
  return string.format('%.0f %.0f', far.died, far.emptied) .. (far.heard and ' ~' or '') .. table.concat(list)
end

-- elsewhere is what all parts give together, or nil when that leaves 64 bits. A part of sequence 0 is this life's
-- own: it stands in the record, and has a base at most.
local function elsewhere(far, kind)
  if kind == 'unique' then return '0' end
  local all = '0'
  for _, p in ipairs(far.list) do
    local counts = minus(p.value, p.base)
    all = counts and plus(all, counts)
    if not all then return nil end
  end
  return all
end

-- takeAway has a reset take away all that is known of a sum, whose own part is own.
local function takeAway(far, region, life, sequence, own)
  for _, p in ipairs(far.list) do
    if p.sequence > 0 then p.at, p.base = p.sequence, p.value end
  end
  local name = partName('sum', region, life)
  if not far.by[name] then addPart(far, name, {region = region, life = life, sequence = 0, value = '0'}) end
  far.by[name].at, far.by[name].base = sequence, own
end

-- after is a moment after now, after another one, and after all lives that are known. A life that begins later
-- without knowing of it, for its memory was lost, is not ended by it.
local function after(far, now, other, life)
  now = math.max(now, other + 1, life + 1)
  for _, p in ipairs(far.list) do now = math.max(now, p.life + 1) end
  return now
end

-- noteChange puts a counter into the log of its bucket, at the end.
local function noteChange(state, log, key)
  redis.call('ZADD', log, redis.call('HINCRBY', state, 'places', 1), key)
  if redis.call('ZCARD', log) > LOGGED then
    local first = redis.call('ZRANGE', log, 0, LOGGED / 16 - 1, 'WITHSCORES')
    for i = 1, #first, 2 do redis.call('ZREM', log, first[i]) end
    redis.call('HSET', state, 'trimmed', first[#first])
  end
end

-- bury notes that a counter was deleted, at died. What was deleted long ago is forgotten: a region that was away for longer
-- may bring it back.
local REMEMBERED = 30 * 24 * 3600 * 1000
local function bury(counters, fars, gone, key, died, now)
  redis.call('ZADD', gone, string.format('%.0f', died), key)
  for _, old in ipairs(redis.call('ZRANGEBYSCORE', gone, '-inf', string.format('%.0f', now - REMEMBERED), 'LIMIT', 0, 8)) do
    if redis.call('HEXISTS', counters, old) == 0 then redis.call('HDEL', fars, old) end
    redis.call('ZREM', gone, old)
  end
end
