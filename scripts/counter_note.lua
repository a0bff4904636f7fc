-- counter_note.lua: note in a bucket what PostgreSQL has committed.
--
-- KEYS     hc:{n}:c, hc:{n}:s, hc:{n}:a; then identities
-- ARGV     how long an identity is remembered, ms; highest incarnation that was deleted; keys of counters that
--          have no row any more
-- Returns  1
-- Safe to repeat and to arrive late: what is forgotten is only looked for anew. O(keys).

for i = 4, #KEYS do redis.call('SET', KEYS[i], '', 'PX', ARGV[1]) end
if tonumber(ARGV[2]) > tonumber(redis.call('HGET', KEYS[2], 'deleted') or 0) then redis.call('HSET', KEYS[2], 'deleted', ARGV[2]) end
for i = 3, #ARGV do
  if redis.call('HGET', KEYS[1], ARGV[i]) == 'pg' then
    redis.call('HDEL', KEYS[1], ARGV[i])
    redis.call('ZREM', KEYS[3], ARGV[i])
    redis.call('HINCRBY', KEYS[2], 'left', 1)
  end
end
return 1
