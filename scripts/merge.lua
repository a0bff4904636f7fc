-- merge.lua: merge a batch of another region's pairs into one bucket. The result is the
-- same as that of presencetest.Copy.Merge.
--
-- KEYS[1]  {b}:s  hash, see README.md   KEYS[2]  {b}:r  set: complete partitions
-- KEYS[3]  {b}:z  zset: pages without users   KEYS[4…] {b}:c:<page>  strings, see page.lua
-- ARGV[1]  channel   ARGV[2]  PUBLISH or SPUBLISH   ARGV[3]  number of partitions
-- ARGV[4]  how many seconds a page without users is remembered
-- ARGV[5]  length of the prefix of the pages' keys   ARGV[6]  region   ARGV[7]  log
-- ARGV[8]  from   ARGV[9]  to   ARGV[10] floor   ARGV[11] 1: complete
-- ARGV[12] 1: days of pages are kept   ARGV[13…] incarnation, increments, decrements per page
-- Returns  {status, log, cursor, highest incarnation, done, pages that changed,
--          pages whose pair could not be read, the minutes that ended, then the places of
--          refused pairs}. A minute: the length of the page (2), the page, and 21 bytes, see
--          remembered; status
--          0 merged, 1 this bucket has no owner yet, 2 a later log is known, 3 a gap. With
--          refused pairs the cursor stays, so that a repetition of the batch refuses them again.
-- Safe to repeat and to arrive late: a pair never falls. The script reads and checks
-- everything before it writes. O(pages).
--#include pairs.lua
--#include publish.lua
--#include page.lua

local region, log = ARGV[6], tonumber(ARGV[7])
local from, to, floor = tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10])
local state = redis.call('HMGET', KEYS[1], 'generation', 'rebuild', 'void', 'base', 'voided', 'peers', 'offset',
  'peer:' .. region, 'past')
local complete, empties = redis.call('SCARD', KEYS[2]), redis.call('ZCARD', KEYS[3])
local known, cursor, high, done = string.match(state[8] or '', '^(%d+) (%d+) (%d+) (%d)$')
known, cursor, high, done = tonumber(known or 0), tonumber(cursor or 0), tonumber(high or 0), done == '1'
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local peers, waits, out = readPeers(state[6], tonumber(time[1]))
local peer = peers[region]
local least = peer and peer.floor or 0

-- counted returns how many of a peer's n users count, and whether the peer is left out.
local function counted(peer, inc, n)
  if not peer or inc < peer.floor or n <= 0 then return 0, false end
  if peer.flag == '0' then return 0, true end
  return n, false
end

local function answer(status, at, changed, malformed, refused, ended)
  local reply = {status, at, cursor, math.max(high, least), done and 1 or 0, changed, malformed, ended or ''}
  for _, i in ipairs(refused) do reply[#reply + 1] = i end
  return reply
end

-- No owner has claimed anything here yet, so there is no generation for the pairs to belong to.
if not state[1] then return answer(1, known, 0, 0, {}) end
-- A late batch of an older log; or a log whose pairs would lose against those that this bucket has.
if log < known or log > known and log <= math.max(high, least) then return answer(2, known, 0, 0, {}) end
if log > known then
  -- What a new log had before this batch is not known here.
  if from > 0 then
    cursor, done = 0, false
    return answer(3, log, 0, 0, {})
  end
  known, cursor, done, high = log, 0, false, math.max(high, log)
elseif from > cursor then
  return answer(3, known, 0, 0, {})
elseif done and to <= cursor then
  return answer(0, known, 0, 0, {})
end

local rebuild, offset = tonumber(state[2] or 0), tonumber(state[7] or 0)
-- the incarnation of a version that begins now
local first = math.max(now, tonumber(state[3] or 0), tonumber(state[4] or 0), tonumber(state[9] or 0) + 1)
local prefix = tonumber(ARGV[5])
local writes, records, refused, ended, malformed = {}, {}, {}, {}, 0
-- otherwise the bucket has all of the batch, or had it and has forgotten pages since
for k = 4, to > cursor and #KEYS or 3 do
  local at = 3 * k + 1
  local inc, up, down = tonumber(ARGV[at]), tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  high = math.max(high, inc)
  local text = redis.pcall('GET', KEYS[k])
  local foreign = text and (type(text) ~= 'string' or not isPage(text))
  local r, users, updated, vinc, seq, own, fell, length, most, width, numbers
  local others, sum, held, hadInc, hadUp, hadDown = '', 0, false, nil, 0, 0
  local area, days = 0, ARGV[12] == '1'
  if text and not foreign then
    r, users, updated, vinc, seq, own, fell, length, most, width, numbers = readPage(text)
    local read = 0
    for name, i, u, d in string.gmatch(pairsOf(text, length), '([%w_-]+) (%d+) (%d+) (%d+);') do
      read = read + #name + #i + #u + #d + 4
      if name == '_' and i == '0' then
        days = true -- see cutArea
        if tonumber(u) == math.floor(updated / 86400) then area = tonumber(d) end
      elseif name == region then
        hadInc, hadUp, hadDown = tonumber(i), tonumber(u), tonumber(d)
      else
        others = others .. name .. ' ' .. i .. ' ' .. u .. ' ' .. d .. ';'
        local n, h = counted(peers[name], tonumber(i), u - d)
        sum, held = sum + n, held or h
      end
    end
    if read ~= length then malformed = malformed + 1 end -- the pairs are rewritten without the unreadable part
  end
  if foreign then
    malformed = malformed + 1 -- the value belongs to another program and stays as it is
  elseif inc < math.max(hadInc or 0, least) then
    -- The region forgot the page, and began it again too low: the old pair would win for ever.
    refused[#refused + 1] = k - 4
  elseif hadInc or up > down then -- otherwise there is nothing to remember
    -- Within an incarnation both only grow, so the greater one is right in whatever order copies come.
    if hadInc == inc then up, down = math.max(up, hadUp), math.max(down, hadDown) end
    local live, body = r == rebuild, ''
    local lost, since = users, updated -- of a void page: what it had, and since when
    if live then
      body = string.sub(text, pageHead + 1, #text - length)
    else
      users, updated, vinc, seq = 0, r and tonumber(state[5] or 0) or 0, math.max(first, (vinc or 0) + 1), 0
      own, fell, width, numbers = vinc, 0, 1, 0
    end
    local same = hadInc == inc and hadUp == up and hadDown == down
    local w = {key = KEYS[k], page = string.sub(KEYS[k], prefix + 1), live = live}
    local before = users + sum + counted(peer, hadInc or 0, hadUp - hadDown)
    local mine, silent = counted(peer, inc, up - down)
    local after = users + sum + mine
    held = held or silent
    if not same then
      if r and not live then
        most = remembered(ended, w.page, since, most, lost + before, before, updated, area)
        area = present(area, since, lost + before, -lost, updated, 0)
      end
      if before ~= after then
        most = remembered(ended, w.page, updated, most or 0, before, after, tonumber(time[1]), area)
        area = present(area, updated, before, after - before, tonumber(time[1]), now % 1000)
        -- as in counts.lua
        if after == 0 then addMinute(ended, w.page, math.floor(time[1] / 60), most, 0, area) end
        seq, updated = seq + 1, tonumber(time[1])
        records[#records + 1] = countHead(#w.page) .. w.page .. countTail(after, updated, vinc, seq + offset)
      end
      local all = others .. region .. ' ' .. ARGV[at] .. ' ' .. up .. ' ' .. down .. ';'
      if days then all = all .. areaText(area, updated) end
      w.text = packBytes(pageForm, rebuild, users, updated, vinc, seq, own, fell, #all, most or 0, width, numbers) ..
        body .. all
    end
    w.expire = after == 0 and not held
    w.persist = (after > 0 or held) and (before == 0 or not done) -- the key may have a time to live
    writes[#writes + 1] = w
  end
end

local changed = 0
for _, w in ipairs(writes) do
  if w.text then
    changed = changed + 1
    if w.live then
      redis.call('SET', w.key, w.text, 'KEEPTTL')
    else
      redis.call('SET', w.key, w.text)
    end
  end
  if w.expire then
    emptied(w.key, w.page, KEYS[3], time[1], ARGV[4])
  elseif w.persist then
    redis.call('PERSIST', w.key)
    if empties > 0 then redis.call('ZREM', KEYS[3], w.page) end
  end
end
-- otherwise the region raises these pairs, and sends the batch again
if #refused == 0 then cursor = math.max(cursor, to) end
local again = false
-- The bucket has all of the log now: a page that it does not name has no users in that region.
if ARGV[11] == '1' and to == cursor and not done then
  done = true
  if peer and (floor > peer.floor or peer.flag == '2') then
    if peer.floor > 0 and floor > peer.floor then
      -- pairs below the floor are void now: totals fall, so versions must grow
      redis.call('HINCRBY', KEYS[1], 'offset', 1)
    end
    again = true
    redis.call('HINCRBY', KEYS[1], 'sweep', 1) -- for pages whose last pair is void now
    least = math.max(floor, peer.floor)
    local z = string.gsub(state[6], '([%w_-]+) (%d) (%d+) (%d+) (%d+);', function(name, flag, _, since, raised)
      if name == region then
        if flag == '2' then flag, since = '1', '0' end
        if floor > peer.floor then raised = peer.floor > 0 and time[1] or '0' end
        return name .. ' ' .. flag .. ' ' .. whole(least) .. ' ' .. since .. ' ' .. raised .. ';'
      end
    end)
    redis.call('HSET', KEYS[1], 'peers', z)
    waits, out = select(2, readPeers(z, tonumber(time[1])))
  end
end
redis.call('HSET', KEYS[1], 'peer:' .. region, whole(known) .. ' ' .. whole(cursor) .. ' ' .. whole(high) .. ' ' ..
  (done and 1 or 0))
if #records > 0 or again then
  publish(KEYS[1], ARGV[1], ARGV[2], waits or complete < tonumber(ARGV[3]), again, out, records)
end
return answer(0, known, changed, malformed, refused, table.concat(ended))
