-- counter_checkpoint.lua: begin a checkpoint of buckets: what is dirty is to be drained, and what becomes dirty from now on
-- waits for the next one.
--
-- KEYS     of each bucket hc:{n}:s, :d, :t, :j, :u
-- ARGV     the generation; the number of the checkpoint
-- Returns  "ok"; "lost": a bucket is not of the generation, or has another checkpoint.
-- Safe to repeat and to arrive late: a checkpoint begins once. O(buckets).

local number = tonumber(ARGV[2])
for at = 1, #KEYS, 5 do
  local f = redis.call('HMGET', KEYS[at], 'generation', 'epoch', 'taken')
  local next = tonumber(f[2] or 0)
  if f[1] ~= ARGV[1] or next ~= number and next ~= number + 1 or next == number and f[3] then return 'lost' end
end
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
