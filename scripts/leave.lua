-- leave.lua: end a process's lease now.
--
-- KEYS[1]  {c}:leases  hash, see renew.lua
-- ARGV[1]  name   ARGV[2]  incarnation
-- Returns  1 if there was a lease, otherwise 0.
-- Safe to repeat and to arrive late: the lease of another incarnation stays. O(1).

local lease = redis.call('HGET', KEYS[1], ARGV[1])
if not lease or string.match(lease, '^%d+ (%d+) ') ~= ARGV[2] then return 0 end
return redis.call('HDEL', KEYS[1], ARGV[1])
