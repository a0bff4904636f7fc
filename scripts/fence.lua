-- fence.lua: write the epochs of new claims to one bucket. If the claims and the bucket's
-- counts have different generations, the script also restarts the bucket's counts.
--
-- KEYS[1]  {b}:s  hash: the state of the bucket, see README.md
-- KEYS[2]  {b}:f  string, see fences.lua
-- KEYS[3]  {b}:r  set: partitions that are complete
-- KEYS[4]  {b}:l  zset: the log, see counts.lua
-- ARGV[1]  generation   ARGV[2]  1: the claims repair a loss of data
-- ARGV[3]  the highest incarnation that the caller knows
-- ARGV[4]  names of the peers, a,b,c; empty: the peers that the bucket has. If the counts
--          restart, totals wait for the peers, and the log restarts too
-- ARGV[5]  the stamp of the fences from now on
-- ARGV[6…] partition, epoch, partition, epoch, …, by partition
-- Returns  the number of partitions whose epoch was new to the bucket.
-- Safe to repeat and to arrive late: an epoch never falls, and a call without a new
-- epoch changes nothing. So a late call cannot bring back an old generation.
-- O(partitions of the claim).
--#include fences.lua

local state = redis.call('HMGET', KEYS[1], 'generation', 'rebuild', 'void', 'base', 'raised', 'log', 'peers', 'given')
redis.call('SCARD', KEYS[3]) -- if this is no set, the script fails here, before it writes
local fences, pieces, done, news = redis.call('GET', KEYS[2]) or '', {ARGV[5]}, stampSize, 0
for i = 6, #ARGV, 2 do
  local p, epoch = tonumber(ARGV[i]), tonumber(ARGV[i + 1])
  if epochOf(fences, p) < epoch then
    news = news + 1
    local at = stampSize + p * epochSize
    local between = string.sub(fences, done + 1, at)
    pieces[#pieces + 1] = between .. string.rep('\0', at - done - #between) .. struct.pack('>I6', epoch)
    done = at + epochSize
  end
end
if news == 0 then return 0 end

local again = ARGV[2] == '1'
local rebuild = tonumber(state[2] or 0)
local void, base, raised = tonumber(state[3] or 0), tonumber(state[4] or 0), tonumber(state[5] or 0)
local other = state[1] ~= ARGV[1]
state[6] = math.max(tonumber(state[6] or 0), tonumber(state[8] or 0)) -- the greatest number of a log so far
if other or again and raised ~= rebuild then
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  -- Above every incarnation that this server or the caller knows, so that no version is given to two values.
  local fresh = math.max(now, tonumber(ARGV[3]) + 1, void + 1, base + 1, tonumber(state[6] or 0) + 1)
  if other then
    -- That voids all pages, without touching any: each names the rebuild that it belongs to.
    rebuild, void = rebuild + 1, fresh
    redis.call('UNLINK', KEYS[3], KEYS[4])
    redis.call('HDEL', KEYS[1], 'log', 'places', 'lacking', 'floor', 'given', 'forgotten')
    redis.call('HSET', KEYS[1], 'voided', time[1])
    redis.call('HINCRBY', KEYS[1], 'sweep', 1) -- void pages that are not written again must expire
    local names, peers = ARGV[4], {}
    if names == '' then names = string.gsub(state[7] or '', '([%w_-]+) %d %d+ %d+ %d+;', '%1,') end
    if names ~= '' then
      for name in string.gmatch(names, '[^,]+') do
        local flag, floor = string.match(';' .. (state[7] or ''), ';' .. string.gsub(name, '%-', '%%-') ..
          ' (%d) (%d+) ')
        if flag == '0' then -- the peer is silent, so its counts will not arrive
          peers[#peers + 1] = name .. ' 0 ' .. floor .. ' ' .. time[1] .. ' 0;'
        else
          peers[#peers + 1] = name .. ' 2 ' .. (floor or 0) .. ' ' .. time[1] .. ' 0;'
        end
        local known = redis.call('HGET', KEYS[1], 'peer:' .. name)
        if known then redis.call('HSET', KEYS[1], 'peer:' .. name, (string.gsub(known, '%d$', '0'))) end
      end
      redis.call('HSET', KEYS[1], 'peers', table.concat(peers), 'log', string.format('%.0f', fresh))
      redis.call('HINCRBY', KEYS[1], 'offset', 1) -- totals fall by the users of a peer that is not in the list any more
    end
  end
  -- A page without a string may have had one before the loss, so it reads as 0 under a version above that one.
  if again or base > 0 then base = fresh end
  if again then raised = rebuild end
  redis.call('HSET', KEYS[1], 'generation', ARGV[1], 'rebuild', rebuild, 'void', string.format('%.0f', void),
    'base', string.format('%.0f', base), 'raised', raised)
end
redis.call('SET', KEYS[2], table.concat(pieces) .. string.sub(fences, done + 1))
return news
