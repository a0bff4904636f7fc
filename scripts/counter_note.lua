-- counter_note.lua: note idempotency keys in a bucket, and the highest incarnation that PostgreSQL deleted.
--
-- KEYS     hc:{n}:s, hc:{n}:j; then idempotency keys
-- ARGV     how long an idempotency key is remembered, ms; highest incarnation that was deleted; 1: the next checkpoint has to
--          persist the idempotency keys
-- Returns  1
-- Safe to repeat and to arrive late, because both only grow. O(idempotency keys).

local fresh = ARGV[3] == '1' and redis.call('HEXISTS', KEYS[1], 'generation') == 1
for i = 3, #KEYS do
  redis.call('SET', KEYS[i], '', 'PX', ARGV[1])
  if fresh then redis.call('RPUSH', KEYS[2], string.match(KEYS[i], ':i:(.+)$')) end
end
if fresh and #KEYS > 2 then
  local clock = redis.call('TIME')
  redis.call('HSETNX', KEYS[1], 'since', string.format('%.0f', clock[1] * 1000 + math.floor(clock[2] / 1000)))
end
if tonumber(ARGV[2]) > tonumber(redis.call('HGET', KEYS[1], 'deleted') or 0) then redis.call('HSET', KEYS[1], 'deleted', ARGV[2]) end
return 1
