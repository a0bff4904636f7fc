-- counts.lua: write the partitions' absolute counts to the pages of one bucket, add
-- them up, and publish the changed totals in one message.
--
-- KEYS[1]  {b}:s  hash, see README.md   KEYS[2]  {b}:f  string, see fences.lua
-- KEYS[3]  {b}:r  set: partitions that are complete
-- KEYS[4]  {b}:l  zset: page -> place of its last change in the region's log
-- KEYS[5]  {b}:z  zset: pages without users   KEYS[6]  {b}:w:<process>  string: number of
--          the caller's last run here   KEYS[7…] {b}:c:<page>  strings, see page.lua
-- ARGV[1]  channel   ARGV[2]  PUBLISH or SPUBLISH   ARGV[3]  number of partitions
-- ARGV[4]  the highest incarnation that the caller knows   ARGV[5]  how many seconds a
--          page without users is remembered   ARGV[6]  length of the prefix of the
--          pages' keys   ARGV[7]  generation
-- ARGV[8]  number of the run among the caller's runs in this bucket; it grows
-- ARGV[9]  1: the run continues a change that the run before it began
-- ARGV[10] the stamp of the fences under which the caller's epochs were valid; -: it knows none
-- ARGV[11] the partitions that have counts or are complete: partition (2), epoch (6)
-- ARGV[12] for each page: the number of its counts (2), and for each count the partition (2,
--          the lower byte first) and the users (5)
-- ARGV[13] 1: minutes of pages are kept; 2: days, too   ARGV[14…] partitions that are complete with this run
-- Returns  {'1' if counts may lack users, otherwise '0'; a digit per partition, or '' if all
--          are written; the number of pages without users; '1' if the bucket must be swept
--          (sweep.lua); the regions that counts leave out; the record of each page's count,
--          see publish.lua; the minutes that ended: for each the length of the page (2), the page and
--          21 bytes, see remembered; the stamp}. The digits: 0 written, 1 there is a newer owner,
--          2 data was lost. {'late'} if a later run of the caller has been carried out, {'gap'} if
--          the run that this one continues is missing; in both cases nothing is written.
-- Safe to repeat and to arrive late, because the number of the run is too low then, and all
-- counts are absolute. It reads and checks everything before it writes. Pages of an older
-- rebuild are void: they have no users of this region. O(counts). This script runs more often
-- than any other, so it reads all pages with one command and writes all pages with one, and it
-- checks the epochs only if the stamp is new to the caller.
--#include pairs.lua
--#include publish.lua
--#include page.lua
--#include fences.lua
local partitions = tonumber(ARGV[3])
--#include numbers.lua

-- lateBy bounds, in seconds, how late a run may arrive.
local lateBy = '3600'

local last = tonumber(redis.call('GET', KEYS[6]) or 0)
if tonumber(ARGV[8]) <= last then return {'late'} end
if ARGV[9] == '1' and tonumber(ARGV[8]) > last + 1 then return {'gap'} end

local state = redis.call('HMGET', KEYS[1], 'generation', 'rebuild', 'void', 'base', 'voided', 'peers', 'offset',
  'log', 'past', 'sweep', 'swept')
-- With foreign data the script fails at one of these reads, before it writes.
local complete, empties = redis.call('SCARD', KEYS[3]), redis.call('ZCARD', KEYS[5])
local highest = tonumber(ARGV[4])
local time = redis.call('TIME')
local second, millis = tonumber(time[1]), math.floor(time[2] / 1000)
local rebuild = tonumber(state[2] or 0)
local void, base, past = tonumber(state[3] or 0), tonumber(state[4] or 0), tonumber(state[9] or 0)
local offset, shared = tonumber(state[7] or 0), (state[6] or '') ~= ''
local logging = state[8] and shared
local peers, waits, out = readPeers(state[6], second)

local stamp = redis.call('GETRANGE', KEYS[2], '0', string.format('%d', stampSize - 1))
local status, bad = '', nil -- bad has the partitions that must not be written
-- The epochs were valid under the caller's stamp, and no claim has been made while the stamp is the same.
if stamp ~= ARGV[10] or state[1] ~= ARGV[7] then
  local fences, claims, digits = redis.call('GET', KEYS[2]) or '', ARGV[11], {}
  bad = {}
  for at = 1, #claims, 8 do
    local p, epoch = unpackBytes('>I2I6', claims, at)
    local e, digit = epochOf(fences, p), '0'
    if e > epoch then
      digit = '1'
    elseif e < epoch or state[1] ~= ARGV[7] then
      -- The bucket does not know the claim, or its pages are of another generation.
      digit = '2'
    end
    digits[#digits + 1] = digit
    bad[p] = digit ~= '0'
  end
  status = table.concat(digits)
end
local ready = {}
for i = 14, #ARGV do
  if not bad or not bad[tonumber(ARGV[i])] then ready[#ready + 1] = ARGV[i] end
end

-- sets has the keys and values that the script will write; back has the pages that get their
-- first user, and left the pages that lose their last user.
local sets, writes, back, left = {}, 0, {}, {}
local remembers, days, ended = ARGV[13] ~= '0', ARGV[13] == '2', {}
-- records has the records of all pages, in three parts each; fresh has the indexes of the
-- records that changed.
local records, fresh, changed, log, prefix = {}, {}, 0, {}, tonumber(ARGV[6])
local counts, at = ARGV[12], 1
local olds = #KEYS > 6 and redis.call('MGET', unpack(KEYS, 7)) or {}
for k = 7, #KEYS do
  local key, old = KEYS[k], olds[k - 6]
  local r, users, updated, inc, seq, own, down, length, most, wide, n = readPage(old, key)
  local area, tail = 0, ''
  if r then area, old, length = cutArea(old, length, updated) end
  local given, p, is = unpackBytes('>I2<I2>I5', counts, at)
  local live, had, numbers, m = r == rebuild, nil, nil, nil
  -- Most runs change one small number of a page that only this region has: that takes no list of pieces.
  if live and given == 1 and wide == 1 and length == 0 and is < 256 and not bad then
    had, numbers, m = setOne(old, n, users, p, counts, at + 2, is)
  end
  local lost, since = users, updated -- of a void page: what it had, and since when
  -- Of a void page the incarnation, the pairs and the time go on. Its users are those of before the loss.
  if not live then
    users, seq, down = 0, 0, 0
    if r then
      updated, inc, old = tonumber(state[5] or 0), math.max(void, inc + 1), pairsOf(old, length)
    else
      updated, inc, length, old = 0, base, 0, ''
    end
  end
  local others, latest, held = 0, updated, false
  if shared and length > 0 then others, latest, held = elsewhere(pairsOf(old, length), peers, updated) end
  local before, delta, moved, said = users + others, 0, false, false
  if had then
    delta, moved, said = is - had, is ~= had, true
  else
    if live then openPage(old, pageHead + 1, wide, n) else openPage(old, 1, 1, 0) end
    for j = 1, given do -- of two counts of one partition, the later one wins
      if j > 1 then p, is = unpackBytes('<I2>I5', counts, at + 7 * j - 5) end
      if not bad or not bad[p] then
        had = setCount(p, is)
        said = true
        if had ~= is then delta, moved = delta + is - had, true end
      end
    end
  end
  at = at + 2 + 7 * given
  local page, start = part(key, prefix + 1), nil
  local i = 3 * k - 20 -- index of the first part of the record
  -- A void page that stays without users need not be written: it is read as empty.
  if moved and (live or delta > 0) then
    if not live then
      -- Above all that anybody has seen of the page, and above the pages that were forgotten for their number.
      own = math.max(second * 1000 + millis, highest + 1, inc, void, base, past + 1)
      inc = own
    end
    if delta ~= 0 then
      if remembers then
        if r and not live then
          most = remembered(ended, page, since, most, lost + others, others, updated, area)
          area = present(area, since, lost + others, -lost, updated, 0)
        end
        most = remembered(ended, page, updated, most, before, before + delta, second, area)
        area = present(area, updated, before, delta, second, millis)
        -- At once: the page may be forgotten before it changes again, and would keep the users of the minute before.
        if before + delta == 0 then addMinute(ended, page, math.floor(second / 60), most, 0, area) end
      else
        most = 0
      end
      users, seq, updated, latest = users + delta, seq + 1, second, second
      if delta < 0 then down = down - delta end
      if logging then log[#log + 1] = page end
      changed = changed + 1
      fresh[changed] = i
    end
    if days then tail = areaText(area, updated) end
    sets[writes + 1] = key
    if numbers then
      start = packBytes(pageForm, rebuild, users, updated, inc, seq, own, down, #tail, most, 1, m)
      sets[writes + 2] = start .. numbers .. tail
    else
      start = packBytes(pageForm, rebuild, users, updated, inc, seq, own, down, length + #tail, most, closePage(users))
      sets[writes + 2] = pageText(start) .. tail
    end
    writes = writes + 2
    -- held: a region that is left out has users there, and may come back.
    if users + others == 0 and not held then
      left[#left + 1] = key
    elseif empties > 0 and before == 0 and r then
      back[#back + 1] = page
    end
  elseif said and r and before == 0 and not held then
    left[#left + 1] = key
  end
  records[i], records[i + 1] = countHeads[#page] or countHead(#page), page
  -- Then the page's own bytes are the end of its record, and need not be packed again.
  if start and others == 0 and latest == updated and offset == 0 then
    records[i + 2] = part(start, countFrom, countTo)
  else
    records[i + 2] = countTail(users + others, latest, inc, seq + offset)
  end
end

if writes > 0 then redis.call('MSET', unpack(sets)) end -- which also removes the keys' expiry
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
-- After all that may fail, so that a run that failed may come once more.
redis.call('SET', KEYS[6], ARGV[8], 'EX', lateBy)
local again = false
if #ready > 0 and redis.call('SADD', KEYS[3], unpack(ready)) > 0 then
  local is = redis.call('SCARD', KEYS[3])
  -- Counts are not stale from here on, but no record says that of pages that did not change: watchers read all of
  -- them.
  if complete < partitions and is >= partitions then again = true end
  complete = is
end
local stale = waits or complete < partitions
local all = table.concat(records)
if changed > 0 or again then
  local news = {all}
  if changed < #KEYS - 6 then
    news = {}
    for j, i in ipairs(fresh) do news[j] = table.concat(records, '', i, i + 2) end
  end
  publish(KEYS[1], ARGV[1], ARGV[2], stale, again, out, news)
end
return {stale and '1' or '0', status, empties, state[10] ~= state[11] and '1' or '0', out, all, table.concat(ended),
  stamp}
