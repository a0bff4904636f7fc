-- counter_abort.lua: take away one bucket's part of a transaction that was aborted.
--
-- KEYS[1]  hc:{n}:x:<transaction>   KEYS[2]  hc:{n}:k
-- ARGV[1]  id of the transaction    ARGV[2…] keys of counters it may have locked
-- Returns  1
-- Safe to repeat and to arrive late: it takes away no lock of another transaction. O(keys).

redis.call('UNLINK', KEYS[1])
for i = 2, #ARGV do
  if string.match(redis.call('HGET', KEYS[2], ARGV[i]) or '', '^%S+') == ARGV[1] then redis.call('HDEL', KEYS[2], ARGV[i]) end
end
return 1
