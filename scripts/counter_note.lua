-- counter_note.lua: note in a bucket identities, and the highest incarnation that PostgreSQL has deleted.
--
-- KEYS     hc:{n}:s; then identities
-- ARGV     how long an identity is remembered, ms; highest incarnation that was deleted
-- Returns  1
-- Safe to repeat and to arrive late: both only grow. O(identities).

for i = 2, #KEYS do redis.call('SET', KEYS[i], '', 'PX', ARGV[1]) end
if tonumber(ARGV[2]) > tonumber(redis.call('HGET', KEYS[1], 'deleted') or 0) then redis.call('HSET', KEYS[1], 'deleted', ARGV[2]) end
return 1
