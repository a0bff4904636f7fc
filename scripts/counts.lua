-- counts.lua: write the partitions' absolute counts to the pages of one bucket, add
-- them up, and publish the changed totals in one message.
--
-- KEYS[1]  {b}:s  hash, see README.md   KEYS[2]  {b}:f  string, see fences.lua
-- KEYS[3]  {b}:r  set: partitions that are complete
-- KEYS[4]  {b}:l  zset: page -> place of its last change in the region's log
-- KEYS[5]  {b}:z  zset: pages without users   KEYS[6…] {b}:c:<page>  hashes, see README.md
-- ARGV[1]  channel   ARGV[2]  PUBLISH or SPUBLISH   ARGV[3]  number of partitions
-- ARGV[4]  the highest incarnation that the caller knows   ARGV[5]  how many seconds a
--          page without users is remembered   ARGV[6]  length of the prefix of the
--          pages' keys   ARGV[7]  prefix of the pages' topics   ARGV[8]  generation
-- ARGV[9…] groups of bytes: partition (4), epoch (6), sequence of the change (6), how many
--          counts of this change in this bucket come before this group (3), 1 if the
--          partition is complete with this group (1). Then, for each count, the number
--          of the page (2) and the users (5)
-- Returns  {'1' if counts may lack users, otherwise '0'; a digit per group; the number of
--          pages without users; '1' if the bucket must be swept (sweep.lua); then
--          'incarnation sequence value' per page (countValue)}. The digits: 0 written
--          now or before, 1 there is a newer owner, 2 data was lost, 3 earlier counts of
--          the change are missing.
-- Safe to repeat and to arrive late: the script skips counts that are not newer than
-- (sequence, done), and all counts are absolute. It reads and checks everything before
-- it writes. Pages of an older rebuild are void: they have no users of this region.
-- O(counts).
--#include pairs.lua
--#include publish.lua
--#include page.lua
--#include fences.lua

local state = redis.call('HMGET', KEYS[1], 'generation', 'rebuild', 'void', 'base', 'voided', 'peers', 'offset', 'log', 'past', 'sweep', 'swept')
local complete, empties = redis.call('SCARD', KEYS[3]), redis.call('ZCARD', KEYS[5])
local total, floor = tonumber(ARGV[3]), tonumber(ARGV[4])
local time = redis.call('TIME')
local second = tonumber(time[1])
local now = second * 1000 + math.floor(time[2] / 1000)
local rebuild = tonumber(state[2] or 0)
local void, base, past = tonumber(state[3] or 0), tonumber(state[4] or 0), tonumber(state[9] or 0)
local offset, shared = tonumber(state[7] or 0), (state[6] or '') ~= ''
local logging = state[8] and shared
local peers, waits, out = readPeers(state[6], second)

local fences = redis.call('GET', KEYS[2]) or ''
local status, fenceWrites, ready, changes = {}, {}, {}, {}
for i = 9, #ARGV do
  local group = ARGV[i]
  local p, epoch, sequence, before, whether, at = struct.unpack('>I4I6I6I3I1', group)
  local n = (#group - 20) / 7
  local e, s, d = fenceOf(fences, p)
  local st = '0'
  if e > epoch then
    st = '1'
  elseif e < epoch or state[1] ~= ARGV[8] then
    st = '2'
  elseif sequence >= s then
    if sequence > s then d = 0 end
    if before > d then
      st = '3'
    else
      for j = d - before, n - 1 do
        local page, users = struct.unpack('>I2I5', group, at + 7 * j)
        local list = changes[page]
        if not list then
          list = {}
          changes[page] = list
        end
        list[#list + 1] = p
        list[#list + 1] = users
      end
      if sequence > s or before + n > d then fenceWrites[#fenceWrites + 1] = {p, epoch, sequence, math.max(d, before + n)} end
      if whether == 1 then ready[#ready + 1] = p end
    end
  end
  status[i - 8] = st
end

local reply, records, log = {'0', table.concat(status), 0, state[10] ~= state[11] and '1' or '0'}, {}, {}
-- What the script will write: keys that begin anew; keys with fields to drop; keys with
-- fields and values to set; keys of pages that get their first user; keys of pages that
-- lost their last user.
local anew, drops, sets, back, left = {}, {}, {}, {}, {}
local prefix, names = tonumber(ARGV[6]), {}
for k = 6, #KEYS do
  local key, list = KEYS[k], changes[k - 5] or {}
  local fields, place = {'v'}, {} -- the place of each block in fields
  if shared then fields[2] = 'p' end
  for j = 1, #list, 2 do
    local b = math.floor(list[j] / 16)
    if not place[b] then
      if not names[b] then names[b] = whole(b) end
      fields[#fields + 1] = names[b]
      place[b] = #fields
    end
  end
  local old = redis.call('HMGET', key, unpack(fields))
  local r, users, updated, inc, seq, own, down = readPage(old[1])
  local live = r == rebuild
  if not live then
    users, seq, down = 0, 0, 0
    if r then
      updated, inc = tonumber(state[5] or 0), math.max(void, inc + 1)
    else
      updated, inc = 0, base
    end
  end
  local others, latest, held = 0, updated, false
  if shared and old[2] then others, latest, held = elsewhere(old[2], peers, updated) end
  local before, delta, moved = users + others, 0, {}
  for j = 1, #list, 2 do -- of two counts of one partition, the later one holds
    local p, n = list[j], list[j + 1]
    local b = math.floor(p / 16)
    local at = place[b]
    local text, had = withCount(live and old[at] or moved[at] and old[at], p - 16 * b, n)
    if n ~= had then old[at], delta, moved[at] = text or false, delta + n - had, true end
  end
  local any = next(moved)
  if any and (live or delta > 0) then
    local set, drop = {key, 'v', ''}, {key}
    for at in pairs(moved) do
      if old[at] then
        set[#set + 1] = fields[at]
        set[#set + 1] = old[at]
      else
        drop[#drop + 1] = fields[at]
      end
    end
    if not live then
      anew[#anew + 1] = key
      inc = math.max(now, floor + 1, inc, void, base, past + 1)
      own = inc
      if shared and old[2] then
        set[#set + 1] = 'p'
        set[#set + 1] = old[2]
      end
    elseif #drop > 1 then
      drops[#drops + 1] = drop
    end
    local page = string.sub(key, prefix + 1)
    if delta ~= 0 then
      users, seq, updated, latest = users + delta, seq + 1, second, second
      if delta < 0 then down = down - delta end
      records[#records + 1] = updateRecord(ARGV[7] .. page, whole(inc), seq + offset, countValue(users + others, updated, out))
      log[#log + 1] = page
    end
    set[3] = pageValue(rebuild, users, updated, inc, seq, own, down)
    sets[#sets + 1] = set
    if users + others == 0 and not held then
      left[#left + 1] = key
    elseif empties > 0 and before == 0 and r then
      back[#back + 1] = key
    end
  elseif #list > 0 and r and before == 0 and not held then
    left[#left + 1] = key
  end
  reply[k - 1] = string.format('%d %d ', inc, seq + offset) .. countValue(users + others, latest, out)
end

for _, key in ipairs(anew) do redis.call('UNLINK', key) end
for _, drop in ipairs(drops) do redis.call('HDEL', unpack(drop)) end
for _, set in ipairs(sets) do redis.call('HSET', unpack(set)) end
for _, key in ipairs(back) do
  redis.call('PERSIST', key)
  redis.call('ZREM', KEYS[5], string.sub(key, prefix + 1))
end
for _, key in ipairs(left) do emptied(key, string.sub(key, prefix + 1), KEYS[5], time[1], ARGV[5]) end
reply[3] = redis.call('ZCARD', KEYS[5])
if state[8] and not logging then
  redis.call('HDEL', KEYS[1], 'log') -- the log lacks this change, so it must begin anew
elseif logging and #log > 0 then
  local n, places = redis.call('HINCRBY', KEYS[1], 'places', #log), {}
  for i, page in ipairs(log) do
    places[2 * i - 1] = string.format('%.0f', n - #log + i)
    places[2 * i] = page
  end
  redis.call('ZADD', KEYS[4], unpack(places))
end
for _, f in ipairs(fenceWrites) do setFence(KEYS[2], unpack(f)) end
local again = false
if #ready > 0 and redis.call('SADD', KEYS[3], unpack(ready)) > 0 then
  local is = redis.call('SCARD', KEYS[3])
  if complete < total and is >= total then again = true end
  complete = is
end
local stale = waits or complete < total
if stale then reply[1] = '1' end
if #records > 0 or again then publish(KEYS[1], ARGV[1], ARGV[2], stale, again, records) end
return reply
