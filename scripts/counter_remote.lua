-- counter_remote.lua: the replica state of a counter, its parts from other regions. Scripts include this file after
-- counter_number.lua; it does not run by itself. counter/regions/model_test.go has the same arithmetic in Go.
--
-- A counter's record has the total of all regions. The part of this region's own incarnation is the record less
-- everything in the counter's field of hc:{n}:f: 'died emptied', then ' region/incarnation/sequence/value/at/base'
-- for each part.
--
-- A sum has a part for each incarnation of each region. A part counts as value - base; base is the value that a reset
-- took away, which the part had at the sequence at. A set and a unique have one part for each other region, of its
-- newest incarnation. died and emptied are the numbers of the last DELETE and, for sets and uniques, of the last
-- reset.
--
-- ' ~' before the parts (heard below) means that this region's incarnation was created by a merge and that this
-- region has not changed the counter since.

local PARTS = 100 -- maximum of one counter; the parts of further incarnations do not count
local LOGGED = 4096 -- maximum number of counters in a bucket's log; a peer that is further behind is sent the whole bucket

-- partName returns the key of a part in remote.by.
local function partName(kind, region, incarnation)
  return kind == 'sum' and region .. '/' .. string.format('%.0f', incarnation) or region
end

local function addPart(remote, name, p)
  remote.list[#remote.list + 1] = p
  remote.by[name] = p
end

-- eachPart parses the parts of a text and calls with for each.
local function eachPart(text, with)
  for region, incarnation, sequence, value, at, base in string.gmatch(text, ' ([^/ ]+)/(%d+)/(%d+)/(%-?%d+)/(%d+)/(%-?%d+)') do
    with({region = region, incarnation = tonumber(incarnation), sequence = tonumber(sequence), value = value, at = tonumber(at), base = base})
  end
end

-- readRemote parses the field of a counter of that kind; text may be false or nil.
local function readRemote(text, kind)
  local remote = {died = 0, emptied = 0, list = {}, by = {}}
  if not text then return remote end
  local died, emptied, parts = string.match(text, '^(%d+) (%d+)(.*)$')
  remote.died, remote.emptied, remote.heard = tonumber(died), tonumber(emptied), string.sub(parts, 1, 2) == ' ~'
  eachPart(parts, function(p) addPart(remote, partName(kind, p.region, p.incarnation), p) end)
  return remote
end

local function partText(p)
  return ' ' .. p.region .. '/' .. string.format('%.0f/%.0f/', p.incarnation, p.sequence) .. p.value .. '/' .. string.format('%.0f/', p.at) .. p.base
end

-- writeRemote returns the text of a field, or nil if it would be empty. It omits parts that have neither a sequence
-- nor a base.
local function writeRemote(remote)
  local list = {}
  for _, p in ipairs(remote.list) do
    if p.sequence > 0 or p.at > 0 then list[#list + 1] = partText(p) end
  end
  if remote.died == 0 and remote.emptied == 0 and not remote.heard and #list == 0 then return nil end
  return string.format('%.0f %.0f', remote.died, remote.emptied) .. (remote.heard and ' ~' or '') .. table.concat(list)
end

-- elsewhere returns the sum of all parts, which may have more than 64 bits: the total and this region's own part have
-- not. A part with the sequence 0 belongs to this region's own incarnation, whose value is in the record; it only has
-- the base of a reset.
local function elsewhere(remote, kind)
  if kind == 'unique' then return '0' end
  local all = '0'
  for _, p in ipairs(remote.list) do all = sumOf(sumOf(all, p.value), negative(p.base)) end
  return all
end

-- takeAway resets a sum: each known part gets its value as its base. own is the value of this region's own part.
local function takeAway(remote, region, incarnation, sequence, own)
  for _, p in ipairs(remote.list) do
    if p.sequence > 0 then p.at, p.base = p.sequence, p.value end
  end
  local name = partName('sum', region, incarnation)
  if not remote.by[name] then addPart(remote, name, {region = region, incarnation = incarnation, sequence = 0, value = '0'}) end
  remote.by[name].at, remote.by[name].base = sequence, own
end

-- after returns a number for a DELETE or a reset: the time now, but greater than other and than all known
-- incarnations, so that it ends these even if a clock is wrong. It does not end an incarnation that begins later in a
-- region that lost its data.
local function after(remote, now, other, incarnation)
  now = math.max(now, other + 1, incarnation + 1)
  for _, p in ipairs(remote.list) do now = math.max(now, p.incarnation + 1) end
  return now
end

-- noteChange moves a counter to the end of its bucket's log. A full log drops its oldest sixteenth and notes where it
-- begins.
local function noteChange(state, log, key)
  redis.call('ZADD', log, redis.call('HINCRBY', state, 'places', 1), key)
  if redis.call('ZCARD', log) > LOGGED then
    local first = redis.call('ZRANGE', log, 0, LOGGED / 16 - 1, 'WITHSCORES')
    for i = 1, #first, 2 do redis.call('ZREM', log, first[i]) end
    redis.call('HSET', state, 'trimmed', first[#first])
  end
end

-- bury notes that a counter was deleted at died, and forgets up to eight old deletions. A region that was
-- disconnected for longer than REMEMBERED may bring a counter back.
local REMEMBERED = 30 * 24 * 3600 * 1000
local function bury(counters, remotes, gone, key, died, now)
  redis.call('ZADD', gone, string.format('%.0f', died), key)
  for _, old in ipairs(redis.call('ZRANGEBYSCORE', gone, '-inf', string.format('%.0f', now - REMEMBERED), 'LIMIT', 0, 8)) do
    if redis.call('HEXISTS', counters, old) == 0 then redis.call('HDEL', remotes, old) end
    redis.call('ZREM', gone, old)
  end
end
