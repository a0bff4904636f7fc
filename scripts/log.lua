-- log.lua: read the pages of one bucket that changed in this region.
--
-- KEYS[1]  {b}:s  hash, see README.md   KEYS[2]  {b}:l  zset, see counts.lua
-- KEYS[3]  {b}:r  set: complete partitions
-- ARGV[1]  number of partitions   ARGV[2]  the log that the caller has read; 0: none
-- ARGV[3]  the place up to which the caller has read it   ARGV[4]  most pages to return
-- Returns  {log, or 0 if no log has all pages; place of its end; floor; 1 if all
--          partitions are complete, 2 if a page after the caller's place was forgotten;
--          page, place, …} in order. If the log is not ARGV[2], the script returns
--          pages from its beginning.
-- Reads only. O(log pages + returned).

local state = redis.call('HMGET', KEYS[1], 'log', 'places', 'void', 'lacking', 'floor', 'forgotten')
local log = state[4] and 0 or tonumber(state[1] or 0)
local reply = {log, tonumber(state[2] or 0), tonumber(state[5] or state[3] or 0),
  redis.call('SCARD', KEYS[3]) >= tonumber(ARGV[1]) and 1 or 0}
if log == 0 or reply[4] == 0 then return reply end
local known = log == tonumber(ARGV[2])
-- A page after that place has left the log, so the caller would never learn that it has no users.
if known and tonumber(ARGV[3]) < tonumber(state[6] or 0) then
  reply[4] = 2
  return reply
end
local from = known and '(' .. ARGV[3] or '-inf'
if tonumber(ARGV[4]) > 0 then
  for _, v in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], from, '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[4])) do
    reply[#reply + 1] = v
  end
end
return reply
