-- counter_checkpoint.lua: begin a checkpoint of buckets. It renames the lists of changed counters and of idempotency keys;
-- later changes belong to the next checkpoint.
--
-- KEYS     for each bucket hc:{n}:s, :d, :t, :j, :u
-- ARGV     the generation; the number of the checkpoint
-- Returns  "ok"; "lost": a bucket has another generation, or another checkpoint
-- Safe to repeat and to arrive late, because a checkpoint begins once in a bucket. O(buckets).

local number = tonumber(ARGV[2])
for at = 1, #KEYS, 5 do
  local f = redis.call('HMGET', KEYS[at], 'generation', 'epoch', 'taken')
  local next = tonumber(f[2] or 0)
  if f[1] ~= ARGV[1] or next ~= number and next ~= number + 1 or next == number and f[3] then return 'lost' end
end
-- All buckets are checked before the first one changes. A bucket may have begun the checkpoint in an earlier run.
for at = 1, #KEYS, 5 do
  if tonumber(redis.call('HGET', KEYS[at], 'epoch')) == number then
    if redis.call('EXISTS', KEYS[at + 1]) == 1 then redis.call('RENAME', KEYS[at + 1], KEYS[at + 2]) end
    if redis.call('EXISTS', KEYS[at + 3]) == 1 then redis.call('RENAME', KEYS[at + 3], KEYS[at + 4]) end
    local since = redis.call('HGET', KEYS[at], 'since')
    redis.call('HDEL', KEYS[at], 'since', 'pending')
    redis.call('HSET', KEYS[at], 'epoch', number + 1, 'taken', number)
    if since then redis.call('HSET', KEYS[at], 'takensince', since) end
  end
end
return 'ok'
