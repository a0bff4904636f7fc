-- fence.lua: tell one bucket the epochs of new claims; rebuild it when they are
-- of another generation than its counts.
--
-- KEYS[1]  {b}:s  hash: g generation, r rebuild, x incarnation that void pages
--                 read as, t its time, b the same for pages without a hash (0: none),
--                 a rebuild at which b was last raised, q sequence of publications
-- KEYS[2]  {b}:f  hash: partition -> 'epoch sequence done'
-- KEYS[3]  {b}:r  set: partitions that are complete
-- ARGV[1]  generation   ARGV[2]  1: the claims make good a loss
-- ARGV[3]  highest incarnation the caller knows
-- ARGV[4…] partition, epoch, partition, epoch, …
-- Returns  number of partitions whose epoch is news here.
-- Safe to repeat and to arrive late: an epoch never falls, and a call none of
-- whose epochs is news changes nothing, so it cannot bring back an old
-- generation. O(partitions of the claim).

local state = redis.call('HMGET', KEYS[1], 'g', 'r', 'x', 'b', 'a')
local partitions = {}
for i = 4, #ARGV, 2 do partitions[#partitions + 1] = ARGV[i] end
local stored = redis.call('HMGET', KEYS[2], unpack(partitions))
redis.call('SCARD', KEYS[3]) -- fails here, before any write, when it is no set
local news = {}
for i, p in ipairs(partitions) do
  local epoch = ARGV[3 + 2 * i]
  if not stored[i] or tonumber(string.match(stored[i], '^%d+')) < tonumber(epoch) then
    news[#news + 1] = p
    news[#news + 1] = epoch .. ' 0 0'
  end
end
if #news == 0 then return 0 end

local again = ARGV[2] == '1'
local rebuild = tonumber(state[2] or 0)
local void, base, raised = tonumber(state[3] or 0), tonumber(state[4] or 0), tonumber(state[5] or 0)
local other = state[1] ~= ARGV[1]
if other or again and raised ~= rebuild then
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  local fresh = math.max(now, tonumber(ARGV[3]) + 1, void + 1, base + 1)
  if other then
    rebuild, void = rebuild + 1, fresh
    redis.call('UNLINK', KEYS[3])
    redis.call('HSET', KEYS[1], 't', time[1])
  end
  if again or base > 0 then base = fresh end
  if again then raised = rebuild end
  redis.call('HSET', KEYS[1], 'g', ARGV[1], 'r', rebuild, 'x', string.format('%.0f', void),
    'b', string.format('%.0f', base), 'a', raised)
end
redis.call('HSET', KEYS[2], unpack(news))
return #news / 2
