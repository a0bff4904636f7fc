-- resize.lua: change the number of hashes that hold a partition's members.
--
-- KEYS[1]  {p}:o  hash, see README.md
-- KEYS[2…] {p}:m:<i>  hashes of members, two for each step: the one that gives or takes
--          members, and the one that begins or ends
-- ARGV[1]  epoch   ARGV[2]  generation   ARGV[3]  number of hashes before   ARGV[4]  and after
-- Returns  0 done, 1 there is a newer owner, 2 data was lost, 4 the number of hashes is
--          another.
-- Whoever loads the partition before or after a call finds all members. The script
-- writes a divided hash anew, since Redis never turns a large hash back into the dense
-- form. Safe to repeat and to arrive late, since the number of hashes is another then.
-- O(members of those hashes).
--#include shares.lua

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
while n > to do
  put(KEYS[at], redis.call('HGETALL', KEYS[at + 1]))
  redis.call('UNLINK', KEYS[at + 1])
  n, at = n - 1, at + 2
end
redis.call('HSET', KEYS[1], 'shares', ARGV[4])
return 0
