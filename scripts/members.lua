-- members.lua: write one batch of a change to a partition: first the pages whose
-- counts are about to be written, then members.
--
-- KEYS[1]  {p}:o  hash, see claim.lua
-- KEYS[2]  {p}:d  set: pages whose count may not have been written
-- KEYS[3…] {p}:m:<i>  hashes: 8 bytes of user and the page -> end of the hold in
--                 unix ms, or empty
-- ARGV[1]  epoch   ARGV[2]  generation   ARGV[3]  sequence of the change
-- ARGV[4]  number of the batch in its change, from 0
-- ARGV[5]  1: all counts before this change have been written, KEYS[2] begins anew
-- ARGV[6]  1: drop the members of all KEYS[3…] first
-- ARGV[7]  number of pages, then the pages; then for each of KEYS[3…] the number of
--          members to set, field and value of each, the number to remove, their fields
-- Returns  0 written, or was before; 1 a newer owner; 2 data was lost; 3 the batch
--          before this one has not been written.
-- Safe to repeat and to arrive late: what is not newer than (sequence, batch) is
-- skipped. The number of the batch is written last: one that fails halfway, on
-- foreign data, counts as not written. The flags ARGV[5] and ARGV[6] count in
-- batch 0 only. O(members).

local owner = redis.call('HMGET', KEYS[1], 'e', 'g', 's', 'i')
local epoch = tonumber(ARGV[1])
if not owner[1] or tonumber(owner[1]) < epoch then return 2 end
if tonumber(owner[1]) > epoch then return 1 end
if owner[2] ~= ARGV[2] then return 2 end
local sequence, batch = tonumber(ARGV[3]), tonumber(ARGV[4])
local lastSequence, lastBatch = tonumber(owner[3]), tonumber(owner[4])
if sequence < lastSequence or sequence == lastSequence and batch <= lastBatch then return 0 end
if batch > 0 and (sequence > lastSequence or batch > lastBatch + 1) then return 3 end
redis.call('SCARD', KEYS[2]) -- foreign data fails here, before it is removed
local reset = batch == 0 and ARGV[6] == '1'
if reset then
  for i = 3, #KEYS do redis.call('HLEN', KEYS[i]) end
end

if batch == 0 and ARGV[5] == '1' then redis.call('UNLINK', KEYS[2]) end
if reset and #KEYS > 2 then redis.call('UNLINK', unpack(KEYS, 3)) end
local pages = tonumber(ARGV[7])
if pages > 0 then redis.call('SADD', KEYS[2], unpack(ARGV, 8, 7 + pages)) end
local at = 8 + pages
for i = 3, #KEYS do
  local n = 2 * ARGV[at]
  if n > 0 then redis.call('HSET', KEYS[i], unpack(ARGV, at + 1, at + n)) end
  at = at + n + 1
  n = tonumber(ARGV[at])
  if n > 0 then redis.call('HDEL', KEYS[i], unpack(ARGV, at + 1, at + n)) end
  at = at + n + 1
end
redis.call('HSET', KEYS[1], 's', ARGV[3], 'i', ARGV[4])
return 0
