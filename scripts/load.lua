-- load.lua: read some shards of a partition for its new owner.
--
-- KEYS[1]  {p}:o  hash, see README.md
-- KEYS[2]  {p}:d  string: pages whose new count may not be written yet, see README.md
-- KEYS[3…] {p}:m:<i>  hashes of members, see members.lua
-- ARGV[1]  epoch   ARGV[2]  generation   ARGV[3]  1: return the pages too
-- ARGV[4]  number of shards, the hashes that hold the members
-- Returns  {status, pages, fields and values of members, now in unix ms}; status 0 read, 1
--          there is a newer owner, 2 data was lost, 4 the number of shards is not ARGV[4].
-- Reads only. O(members read).

local owner = redis.call('HMGET', KEYS[1], 'epoch', 'generation', 'shares')
local epoch = tonumber(ARGV[1])
if not owner[1] or tonumber(owner[1]) < epoch then return {2, '', {}} end
if tonumber(owner[1]) > epoch then return {1, '', {}} end
if owner[2] ~= ARGV[2] then return {2, '', {}} end
-- The members are in other hashes than the caller has named.
if (owner[3] or '1') ~= ARGV[4] then return {4, '', {}} end
local pages, members = '', {}
if ARGV[3] == '1' then pages = redis.call('GET', KEYS[2]) or '' end
for i = 3, #KEYS do
  for _, v in ipairs(redis.call('HGETALL', KEYS[i])) do members[#members + 1] = v end
end
local time = redis.call('TIME')
return {0, pages, members, time[1] * 1000 + math.floor(time[2] / 1000)}
