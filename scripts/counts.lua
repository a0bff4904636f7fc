-- counts.lua: write absolute counts of partitions to pages of one bucket, sum
-- them up, and publish the totals that changed in one message.
--
-- KEYS[1]  {b}:s  hash, see fence.lua
-- KEYS[2]  {b}:f  hash: partition -> 'epoch sequence done': the last change of it
--                 here, and how many of its counts of this bucket are written
-- KEYS[3]  {b}:r  set: partitions that are complete
-- KEYS[4]  {b}:l  zset: page -> place of its last change in the region's log
-- KEYS[5…] {b}:c:<page>  hashes: partition -> users;
--                 v 'rebuild users updated incarnation sequence', users of this region;
--                 l 'incarnation increments decrements' of this region;
--                 p the same of the other regions, see pairs.lua
-- ARGV[1]  channel   ARGV[2]  PUBLISH or SPUBLISH   ARGV[3]  partitions there are
-- ARGV[4]  highest incarnation the caller knows   ARGV[5]  seconds a page with
--          nobody on it is remembered   ARGV[6]  length of the page keys' prefix
-- ARGV[7]  number of groups; then each: partition, epoch, generation, sequence,
--          counts of the change here before this group, 1: complete with this
--          group, number of counts; then each count: number of the page, users
-- Returns  {stale, see staleWord, a digit per group, then
--          'users updated incarnation sequence' per page, users of all regions}; digits: 0 written, or was
--          before; 1 a newer owner; 2 data was lost; 3 counts before are missing.
-- Safe to repeat and to arrive late: counts not newer than (sequence, done) are
-- skipped, and the others are absolute. All is read and checked, then written.
-- Pages of an older rebuild are void: nobody of this region is on them. O(counts).
--#include pairs.lua

local state = redis.call('HMGET', KEYS[1], 'g', 'r', 'x', 'b', 't', 'z', 'y', 'o')
local complete = redis.call('SCARD', KEYS[3])
local total, floor = tonumber(ARGV[3]), tonumber(ARGV[4])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local rebuild = state[2] or '0'
local void, base = tonumber(state[3] or 0), tonumber(state[4] or 0)
local offset, logging = tonumber(state[7] or 0), state[8] and (state[6] or '') ~= ''
local peers, waits, out = readPeers(state[6], tonumber(time[1]))

local groups, partitions, at = {}, {}, 8
for i = 1, tonumber(ARGV[7]) do
  groups[i] = at
  partitions[i] = ARGV[at]
  at = at + 7 + 2 * ARGV[at + 6]
end
local fences = redis.call('HMGET', KEYS[2], unpack(partitions))
local status, fenceWrites, ready, changes = {}, {}, {}, {}
for i, g in ipairs(groups) do
  local epoch, sequence = tonumber(ARGV[g + 1]), tonumber(ARGV[g + 3])
  local before, n = tonumber(ARGV[g + 4]), tonumber(ARGV[g + 6])
  local e, s, d = 0, 0, 0
  if fences[i] then
    e, s, d = string.match(fences[i], '^(%d+) (%d+) (%d+)$')
    e, s, d = tonumber(e), tonumber(s), tonumber(d)
  end
  local st = '0'
  if e > epoch then
    st = '1'
  elseif e < epoch or state[1] ~= ARGV[g + 2] then
    st = '2'
  elseif sequence >= s then
    if sequence > s then d = 0 end
    if before > d then
      st = '3'
    else
      for j = d - before + 1, n do
        local c = g + 5 + 2 * j
        local page = tonumber(ARGV[c])
        local list = changes[page]
        if not list then
          list = {}
          changes[page] = list
        end
        list[#list + 1] = ARGV[g]
        list[#list + 1] = ARGV[c + 1]
      end
      if sequence > s or before + n > d then
        fenceWrites[#fenceWrites + 1] = ARGV[g]
        fenceWrites[#fenceWrites + 1] = ARGV[g + 1] .. ' ' .. ARGV[g + 3] .. ' ' .. math.max(d, before + n)
      end
      if ARGV[g + 5] == '1' then ready[#ready + 1] = ARGV[g] end
    end
  end
  status[i] = st
end

local reply, writes, body, log = {'0', table.concat(status)}, {}, {}, {}
local prefix = tonumber(ARGV[6])
for k = 5, #KEYS do
  local key, list = KEYS[k], changes[k - 4] or {}
  local fields = {'v', 'l', 'p'}
  for j = 1, #list, 2 do fields[#fields + 1] = list[j] end
  local old = redis.call('HMGET', key, unpack(fields))
  local r, users, updated, inc, seq -- inc stays text: it may be too long for a number made text
  if old[1] then r, users, updated, inc, seq = string.match(old[1], '^(%d+) (%d+) (%d+) (%d+) (%d+)$') end
  local live = r == rebuild
  if live then
    users, seq = tonumber(users), tonumber(seq)
  elseif r then
    users, updated, inc, seq = 0, state[5] or '0', string.format('%.0f', math.max(void, inc + 1)), 0
  else
    users, updated, inc, seq = 0, '0', string.format('%.0f', base), 0
  end
  local sets, dels, last, delta = {}, {}, {}, 0
  for j = 1, #list, 2 do last[list[j]] = list[j + 1] end -- of two counts in one change the later holds
  for j = 1, #list, 2 do
    local p, n = list[j], last[list[j]]
    if n then
      last[p] = nil
      local had = live and tonumber(old[3 + (j + 1) / 2] or 0) or 0
      if tonumber(n) ~= had then
        delta = delta + n - had
        if n == '0' then
          dels[#dels + 1] = p
        else
          sets[#sets + 1] = p
          sets[#sets + 1] = n
        end
      end
    end
  end
  local others, latest, held = 0, updated, false
  if old[3] then others, latest, held = elsewhere(old[3], peers, updated) end
  if #sets > 0 or live and #dels > 0 then
    local w = {key = key, live = live, sets = sets, dels = dels, empty = users > 0 and users + delta + others == 0 and not held, back = live and users == 0 and delta > 0}
    local linc, up, down = 0, 0, 0
    if live then
      linc, up, down = string.match(old[2], '^(%d+) (%d+) (%d+)$')
    else
      inc = string.format('%.0f', math.max(now, floor + 1, tonumber(inc), void, base))
      linc = inc
      w.p = old[3]
    end
    if delta ~= 0 then
      users, seq, updated, latest = users + delta, seq + 1, time[1], time[1]
      if delta > 0 then up = up + delta else down = down - delta end
      local page = string.sub(key, prefix + 1)
      body[#body + 1] = 'c ' .. #page .. ' ' .. users + others .. ' ' .. updated .. ' ' .. inc .. ' ' .. seq + offset .. '\n' .. page
      w.v = rebuild .. ' ' .. users .. ' ' .. updated .. ' ' .. inc .. ' ' .. seq
      log[#log + 1] = page
      w.l = linc .. ' ' .. up .. ' ' .. down
    end
    writes[#writes + 1] = w
  end
  reply[k - 2] = users + others .. ' ' .. latest .. ' ' .. inc .. ' ' .. seq + offset
end

for _, w in ipairs(writes) do
  if not w.live then redis.call('UNLINK', w.key) end
  if w.v then
    w.sets[#w.sets + 1] = 'v'
    w.sets[#w.sets + 1] = w.v
    w.sets[#w.sets + 1] = 'l'
    w.sets[#w.sets + 1] = w.l
  end
  if w.p then
    w.sets[#w.sets + 1] = 'p'
    w.sets[#w.sets + 1] = w.p
  end
  if #w.dels > 0 then redis.call('HDEL', w.key, unpack(w.dels)) end
  if #w.sets > 0 then redis.call('HSET', w.key, unpack(w.sets)) end
  if w.empty then redis.call('EXPIRE', w.key, ARGV[5]) elseif w.back then redis.call('PERSIST', w.key) end
end
if state[8] and not logging then
  redis.call('HDEL', KEYS[1], 'o') -- the log lacks this change: it must begin anew
elseif logging and #log > 0 then
  local n, places = redis.call('HINCRBY', KEYS[1], 'n', #log), {}
  for i, page in ipairs(log) do
    places[2 * i - 1] = string.format('%.0f', n - #log + i)
    places[2 * i] = page
  end
  redis.call('ZADD', KEYS[4], unpack(places))
end
if #fenceWrites > 0 then redis.call('HSET', KEYS[2], unpack(fenceWrites)) end
local again = 0
if #ready > 0 and redis.call('SADD', KEYS[3], unpack(ready)) > 0 then
  local is = redis.call('SCARD', KEYS[3])
  if complete < total and is >= total then again = 1 end
  complete = is
end
reply[1] = staleWord(waits or complete < total, out)
if #body > 0 or again == 1 then
  local q = redis.call('HINCRBY', KEYS[1], 'q', 1)
  redis.call(ARGV[2], ARGV[1], string.format('%.0f ', q) .. header(reply[1], again) .. table.concat(body))
end
return reply
