-- counter_cut.lua: set aside what is dirty in buckets, and begin their next epoch.
--
-- KEYS     of each bucket hc:{n}:s, :d, :t, :j, :u
-- ARGV     the generation; the epoch that ends
-- Returns  "ok"; "lost": a bucket is not of the generation and epoch.
-- Safe to repeat and to arrive late: an epoch ends once. O(buckets).

local ends = tonumber(ARGV[2])
for at = 1, #KEYS, 5 do
  local f = redis.call('HMGET', KEYS[at], 'generation', 'epoch', 'taken')
  local epoch = tonumber(f[2] or 0)
  if f[1] ~= ARGV[1] or epoch ~= ends and epoch ~= ends + 1 or epoch == ends and f[3] then return 'lost' end
end
for at = 1, #KEYS, 5 do
  if tonumber(redis.call('HGET', KEYS[at], 'epoch')) == ends then
    if redis.call('EXISTS', KEYS[at + 1]) == 1 then redis.call('RENAME', KEYS[at + 1], KEYS[at + 2]) end
    if redis.call('EXISTS', KEYS[at + 3]) == 1 then redis.call('RENAME', KEYS[at + 3], KEYS[at + 4]) end
    local since = redis.call('HGET', KEYS[at], 'since')
    redis.call('HDEL', KEYS[at], 'since', 'pending')
    redis.call('HSET', KEYS[at], 'epoch', ends + 1, 'taken', ends)
    if since then redis.call('HSET', KEYS[at], 'takensince', since) end
  end
end
return 'ok'
