-- counts.lua: write the partitions' absolute counts to the pages of one bucket, add
-- them up, and publish the changed totals in one message.
--
-- KEYS[1]  {b}:s  hash, see README.md   KEYS[2]  {b}:f  string, see fences.lua
-- KEYS[3]  {b}:r  set: partitions that are complete
-- KEYS[4]  {b}:l  zset: page -> place of its last change in the region's log
-- KEYS[5]  {b}:z  zset: pages without users   KEYS[6…] {b}:c:<page>  strings, see page.lua
-- ARGV[1]  channel   ARGV[2]  PUBLISH or SPUBLISH   ARGV[3]  number of partitions
-- ARGV[4]  the highest incarnation that the caller knows   ARGV[5]  how many seconds a
--          page without users is remembered   ARGV[6]  length of the prefix of the
--          pages' keys   ARGV[7]  generation
-- ARGV[8]  groups of counts, by partition, 22 bytes each: partition (4), epoch (6), sequence of
--          the change (6), how many counts of this change in this bucket there are up to
--          the end of this group (3), how many the group has (2), 1 if the partition is
--          complete with this group (1)
-- ARGV[9]  for each page: how many counts it gets (2), and for each count the number of
--          its group (2) and the users (5)
-- ARGV[10] 1: pages remember minutes
-- Returns  {'1' if counts may lack users, otherwise '0'; a digit per group; the number of
--          pages without users; '1' if the bucket must be swept (sweep.lua); the regions that
--          counts leave out; the record of each page's count, see publish.lua; the minutes that
--          ended: for each the number of the page (2), and 14 bytes, see remember.lua}. The digits: 0
--          written now or before, 1 there is a newer owner, 2 data was lost, 3 earlier counts
--          of the change are missing.
-- Safe to repeat and to arrive late: the script skips groups that are not newer than
-- (sequence, done), and all counts are absolute. It reads and checks everything before
-- it writes. Pages of an older rebuild are void: they have no users of this region.
-- O(counts). This is the script that runs most, so it reads all pages with one command,
-- and writes all pages with one.
--#include pairs.lua
--#include publish.lua
--#include page.lua
--#include fences.lua
local partitions = tonumber(ARGV[3])
--#include numbers.lua

local state = redis.call('HMGET', KEYS[1], 'generation', 'rebuild', 'void', 'base', 'voided', 'peers', 'offset', 'log', 'past', 'sweep', 'swept')
local complete, empties = redis.call('SCARD', KEYS[3]), redis.call('ZCARD', KEYS[5])
local floor = tonumber(ARGV[4])
local time = redis.call('TIME')
local second = tonumber(time[1])
local rebuild = tonumber(state[2] or 0)
local void, base, past = tonumber(state[3] or 0), tonumber(state[4] or 0), tonumber(state[9] or 0)
local offset, shared = tonumber(state[7] or 0), (state[6] or '') ~= ''
local logging = state[8] and shared
local peers, waits, out = readPeers(state[6], second)

-- owners has the partitions of the groups that are to be written.
local owners, status, ready, groups = {}, {}, {}, ARGV[8]
local fences = openFences(KEYS[2], (struct.unpack('>I4', groups)), (struct.unpack('>I4', groups, #groups - 21)))
local p, e, s, d = -1, 0, 0, 0
local groupForm = '>I4I6I6I3I2I1'
for at = 1, #groups, 22 do
  local q, epoch, sequence, done, n, whether = unpackBytes(groupForm, groups, at)
  if q ~= p then
    p = q
    e, s, d = fenceOf(fences, p)
  end
  local g, st = #status + 1, '0'
  if e > epoch then
    st = '1'
  elseif e < epoch or state[1] ~= ARGV[7] then
    st = '2'
  elseif sequence >= s then
    local before = sequence > s and 0 or d
    if done - n > before then
      st = '3'
    else
      if sequence > s or done > before then
        owners[g], s, d = p, sequence, done
        putFence(fences, p, part(groups, at + 4, at + 18))
      end
      if whether == 1 then ready[#ready + 1] = p end
    end
  end
  status[g] = st
end

-- What the script will write: the pages' keys and values; those of pages that get their
-- first user, and of pages that lost their last user.
local sets, back, left = {}, {}, {}
local remembers, ended = ARGV[10] == '1', {}
-- records are those of all pages, in three parts each; fresh says which of them changed.
local records, fresh, changed, log, prefix = {}, {}, 0, {}, tonumber(ARGV[6])
local counts, at = ARGV[9], 1
local olds = #KEYS > 5 and redis.call('MGET', unpack(KEYS, 6)) or {}
for k = 6, #KEYS do
  local key, old = KEYS[k], olds[k - 5]
  local r, users, updated, inc, seq, own, down, length, most, wide, n = readPage(old, key)
  local live = r == rebuild
  if live then
    openPage(old, pageHead + 1, wide, n)
  else
    users, seq, down = 0, 0, 0
    if r then
      updated, inc, old = tonumber(state[5] or 0), math.max(void, inc + 1), pairsOf(old, length)
    else
      updated, inc, length, old = 0, base, 0, ''
    end
    openPage(old, 1, 1, 0)
  end
  local others, latest, held = 0, updated, false
  if shared and length > 0 then others, latest, held = elsewhere(pairsOf(old, length), peers, updated) end
  local before, delta, moved, said = users + others, 0, false, false
  local given, g, is = unpackBytes('>I2I2I5', counts, at)
  for j = 1, given do -- of two counts of one partition, the later one holds
    if j > 1 then g, is = unpackBytes('>I2I5', counts, at + 7 * j - 5) end
    if owners[g] then
      local had = setCount(owners[g], is)
      said = true
      if had ~= is then delta, moved = delta + is - had, true end
    end
  end
  at = at + 2 + 7 * given
  local page, start = part(key, prefix + 1), nil
  if moved and (live or delta > 0) then
    if not live then
      own = math.max(second * 1000 + math.floor(time[2] / 1000), floor + 1, inc, void, base, past + 1)
      inc = own
    end
    if delta ~= 0 then
      local over
      if remembers then most, over = remembered(live, updated, most, before, before + delta, second) else most = 0 end
      if over then ended[#ended + 1] = packBytes('>I2', k - 6) .. over end
      users, seq, updated, latest = users + delta, seq + 1, second, second
      if delta < 0 then down = down - delta end
      if logging then log[#log + 1] = page end
      fresh[k], changed = true, changed + 1
    end
    start = pageStart(rebuild, users, updated, inc, seq, own, down, length, most, closePage(users))
    sets[#sets + 1] = key
    sets[#sets + 1] = pageText(start)
    if users + others == 0 and not held then
      left[#left + 1] = key
    elseif empties > 0 and before == 0 and r then
      back[#back + 1] = page
    end
  elseif said and r and before == 0 and not held then
    left[#left + 1] = key
  end
  local m = 3 * k - 18
  records[m + 1], records[m + 2] = countHead(#page), page
  if start and others == 0 and latest == updated and offset == 0 then
    records[m + 3] = part(start, countFrom, countTo)
  else
    records[m + 3] = countTail(users + others, latest, inc, seq + offset)
  end
end

if #sets > 0 then redis.call('MSET', unpack(sets)) end -- which also ends the times to live
if #back > 0 then redis.call('ZREM', KEYS[5], unpack(back)) end
for _, key in ipairs(left) do emptied(key, string.sub(key, prefix + 1), KEYS[5], time[1], ARGV[5]) end
if #back + #left > 0 then empties = redis.call('ZCARD', KEYS[5]) end
if state[8] and not logging then
  redis.call('HDEL', KEYS[1], 'log') -- the log lacks this change, so it must begin anew
elseif #log > 0 then
  local n, places = redis.call('HINCRBY', KEYS[1], 'places', #log), {}
  for i, page in ipairs(log) do
    places[2 * i - 1] = string.format('%.0f', n - #log + i)
    places[2 * i] = page
  end
  redis.call('ZADD', KEYS[4], unpack(places))
end
writeFences(fences)
local again = false
if #ready > 0 and redis.call('SADD', KEYS[3], unpack(ready)) > 0 then
  local is = redis.call('SCARD', KEYS[3])
  if complete < partitions and is >= partitions then again = true end
  complete = is
end
local stale = waits or complete < partitions
local all = table.concat(records)
if changed > 0 or again then
  local news = {all}
  if changed < #KEYS - 5 then
    news = {}
    for k in pairs(fresh) do news[#news + 1] = table.concat(records, '', 3 * k - 17, 3 * k - 15) end
  end
  publish(KEYS[1], ARGV[1], ARGV[2], stale, again, out, news)
end
return {stale and '1' or '0', table.concat(status), empties, state[10] ~= state[11] and '1' or '0', out, all, table.concat(ended)}
