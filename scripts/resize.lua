-- resize.lua: change the number of shards, the hashes that hold a partition's members.
--
-- KEYS[1]  {p}:o  hash, see README.md
-- KEYS[2…] {p}:m:<i>  hashes of members, two for each step: the shard that is split or
--          receives members, and the shard that is added or removed
-- ARGV[1]  epoch   ARGV[2]  generation   ARGV[3]  number of shards before   ARGV[4]  and after
-- Returns  0 done, 1 there is a newer owner, 2 data was lost, 4 the number of shards is not
--          ARGV[3].
-- A process that loads the partition between two calls finds all members. The script
-- rewrites a hash that is split, since Redis never turns a large hash back into the compact
-- form. Safe to repeat and to arrive late, since the number of shards is not ARGV[3] then. It
-- changes by one at a time, so a step splits or merges one shard only. O(members of those hashes).

-- within returns the smallest power of two that is at least n.
local function within(n)
  local size = 1
  while size < n do size = 2 * size end
  return size
end

-- spread returns a number that depends on the user in a member's field.
local function spread(field)
  local a, b, c, d, e, f, g, h = string.byte(field, 1, 8)
  return ((a * 256 + b) * 256 + c) * 256 + d + ((e * 256 + f) * 256 + g) * 256 + h
end

local owner = redis.call('HMGET', KEYS[1], 'epoch', 'generation', 'shares')
local epoch = tonumber(ARGV[1])
if not owner[1] or tonumber(owner[1]) < epoch then return 2 end
if tonumber(owner[1]) > epoch then return 1 end
if owner[2] ~= ARGV[2] then return 2 end
if (owner[3] or '1') ~= ARGV[3] then return 4 end
for i = 2, #KEYS do redis.call('HLEN', KEYS[i]) end -- with foreign data the script fails here, before it writes

local function put(key, list)
  for i = 1, #list, 1000 do redis.call('HSET', key, unpack(list, i, math.min(i + 999, #list))) end
end
local n, to, at = tonumber(ARGV[3]), tonumber(ARGV[4]), 2
while n < to do
  local size, all, stay, move = within(n + 1), redis.call('HGETALL', KEYS[at]), {}, {}
  for i = 1, #all, 2 do
    local list = spread(all[i]) % size == n and move or stay
    list[#list + 1] = all[i]
    list[#list + 1] = all[i + 1]
  end
  if #move > 0 then
    redis.call('UNLINK', KEYS[at])
    put(KEYS[at], stay)
    put(KEYS[at + 1], move)
  end
  n, at = n + 1, at + 2
end
-- The last shard goes back to the one that it was split from.
while n > to do
  put(KEYS[at], redis.call('HGETALL', KEYS[at + 1]))
  redis.call('UNLINK', KEYS[at + 1])
  n, at = n - 1, at + 2
end
redis.call('HSET', KEYS[1], 'shares', ARGV[4])
return 0
