-- counter_outcome.lua: what became of a transaction; one that is not decided is aborted.
--
-- KEYS[1]  hc:{n}:x:<transaction>, in the bucket that is its home
-- ARGV[1]  how long an abort is remembered, ms: longer than a decision can be on its way
-- Returns  "aborted", or what was noted when it was committed
-- Safe to repeat and to arrive late: what is decided stays. O(1).

local noted = redis.call('GET', KEYS[1])
if noted then return noted end
redis.call('SET', KEYS[1], 'aborted', 'PX', ARGV[1])
return 'aborted'
