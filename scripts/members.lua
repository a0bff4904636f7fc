-- members.lua: write one batch of a change to a partition. The batch lists the pages that
-- will get new counts, and sets and removes members.
--
-- KEYS[1]  {p}:o  hash, see README.md
-- KEYS[2]  {p}:d  string: pages whose new count may not be written yet, see README.md
-- KEYS[3…] {p}:m:<i>  hashes, the shards of the members: 8 bytes of user and the page -> end
--                 of the hold in unix ms of this server, after + if the user is present by the
--                 hold alone; or empty. The hashes to drop come first, then those to change
-- KEYS[n]  {p}:s  zset, with flag 4 only: 8 bytes of user -> when the user departed, unix seconds
-- ARGV[1]  epoch   ARGV[2]  generation   ARGV[3]  sequence of the change
-- ARGV[4]  number of the batch in its change, from 0
-- ARGV[5]  sum of flags: 1 ARGV[8] replaces KEYS[2]; 2 with this batch all members of this
--          generation are written; 4 the last key is {p}:s
-- ARGV[6]  number of shards   ARGV[7]  0; otherwise the script drops all members first, and
--          this is the number of shards from then on
-- ARGV[8]  pages for KEYS[2], in its form. Only batch 0 has pages
-- ARGV[9…] for each hash to change: the number of members to set, field and value of
--          each, the number to remove, their fields. A value is how many ms the hold lasts,
--          after + as above; or it is empty
-- then     with flag 4: for how many seconds departures are remembered, the first unix second
--          that is, how many of them at most; and of each departure the unix second and the user
-- Returns  {status, number of shards, members}; status 0 written now or before, 1 there is
--          a newer owner, 2 data was lost, 3 the batch before this one is not written, 4
--          the number of shards is not ARGV[6], 5 a later change is written.
-- Safe to repeat and to arrive late: the script skips a batch that is not newer than the
-- stored (sequence, batch). It writes the number of the batch last, so a batch that fails
-- halfway, on foreign data, counts as not written. The first flag and ARGV[7] count in
-- batch 0 only. O(members).

local flags = tonumber(ARGV[5])
local owner = redis.call('HMGET', KEYS[1], 'epoch', 'generation', 'sequence', 'batch', 'shares', 'members')
local epoch, shards, members = tonumber(ARGV[1]), tonumber(owner[5] or 1), tonumber(owner[6] or 0)
local function answer(status) return {status, shards, members} end
-- Redis has lost the claim: it was emptied, or came back older.
if not owner[1] or tonumber(owner[1]) < epoch then return answer(2) end
if tonumber(owner[1]) > epoch then return answer(1) end
if owner[2] ~= ARGV[2] then return answer(2) end
local sequence, batch = tonumber(ARGV[3]), tonumber(ARGV[4])
local lastSequence, lastBatch = tonumber(owner[3]), tonumber(owner[4])
if sequence < lastSequence then return answer(5) end
if sequence == lastSequence and batch <= lastBatch then return answer(0) end
-- Without the batch before it, the change would count as whole and lack members.
if batch > 0 and (sequence > lastSequence or batch > lastBatch + 1) then return answer(3) end
if shards ~= tonumber(ARGV[6]) then return answer(4) end
redis.call('STRLEN', KEYS[2]) -- with foreign data the script fails here, before it removes anything

local first = 3
if batch == 0 and ARGV[7] ~= '0' then
  first = 3 + shards
  -- Foreign data shows here, before the first hash is gone.
  for i = 3, first - 1 do redis.call('HLEN', KEYS[i]) end
  for i = 3, first - 1 do redis.call('UNLINK', KEYS[i]) end
  shards, members = tonumber(ARGV[7]), 0
  -- At once, so that the numbers are right even if the script fails further down.
  redis.call('HSET', KEYS[1], 'shares', ARGV[7], 'members', '0')
end
if batch == 0 and flags % 2 == 1 then
  redis.call('SET', KEYS[2], ARGV[8])
elseif ARGV[8] ~= '' then
  redis.call('APPEND', KEYS[2], ARGV[8])
end
local now
-- A hold ends by the clock of this server, since those of owners differ.
local function ends(hold)
  if not now then
    local time = redis.call('TIME')
    now = time[1] * 1000 + math.floor(time[2] / 1000)
  end
  return string.match(hold, '^%+?') .. string.format('%.0f', now + hold)
end
local at, last = 9, #KEYS
if flags >= 4 then last = last - 1 end
for i = first, last do
  local n = 2 * ARGV[at]
  for j = at + 2, at + n, 2 do
    if ARGV[j] ~= '' then ARGV[j] = ends(ARGV[j]) end
  end
  -- HSET returns how many of the fields are new.
  if n > 0 then members = members + redis.call('HSET', KEYS[i], unpack(ARGV, at + 1, at + n)) end
  at = at + n + 1
  n = tonumber(ARGV[at])
  if n > 0 then members = members - redis.call('HDEL', KEYS[i], unpack(ARGV, at + 1, at + n)) end
  at = at + n + 1
end
if flags >= 4 then
  local seen, most = KEYS[#KEYS], 1000 -- most members that are removed at a time; a batch adds fewer
  local function forget(old)
    if #old > 0 then redis.call('ZREM', seen, unpack(old)) end
  end
  -- The latest departure of a user counts, whichever owner reports it.
  redis.call('ZADD', seen, 'GT', unpack(ARGV, at + 3))
  forget(redis.call('ZRANGEBYSCORE', seen, '-inf', '(' .. ARGV[at + 1], 'LIMIT', 0, most))
  local excess = redis.call('ZCARD', seen) - ARGV[at + 2]
  if excess > 0 then forget(redis.call('ZRANGE', seen, 0, math.min(excess, most) - 1)) end
  redis.call('EXPIRE', seen, ARGV[at])
end
redis.call('HSET', KEYS[1], 'sequence', ARGV[3], 'batch', ARGV[4], 'members', string.format('%d', members))
if flags % 4 >= 2 then redis.call('HSET', KEYS[1], 'whole', ARGV[2]) end
return answer(0)
