-- counter_restore.lua: replace a counter by a copy, in a Redis without PostgreSQL.
--
-- KEYS[1]  hc:{n}:c   KEYS[2] members   KEYS[3] registers   KEYS[4] ledger
-- KEYS[5]  list of time buckets of a unique   KEYS[6]  staged members (counter_stage.lua)   KEYS[7] counts of dimensions
-- KEYS[8]  hc:{n}:f   KEYS[9] hc:{n}:s   KEYS[10…] histories of a sum
-- ARGV[1]  key   ARGV[2] its state as the caller read it, or ''   ARGV[3] its new state   ARGV[4] registers, or ''
-- ARGV[5]  1: there are staged members   ARGV[6] its field of hc:{n}:f, or ''
-- ARGV[7…] number of ledger entries, and for each id, op, delta, value after, reason, by; number of counts of dimensions,
--          and for each name:value and count; for each history its text, or '', and its retention in ms; for each time
--          bucket of a unique step:index, registers, and when it expires in unix ms
-- Returns  1; 0: nothing was written, because the counter has changed since, or the staged members have expired
-- It ends the bucket's log for other regions and forgets this region's positions in theirs, so that both sides send the
-- bucket whole. Safe to repeat: then the counter has changed. O(size of the copy).
--#include counter_steps.lua

local key, n = ARGV[1], tonumber(ARGV[7])
if (redis.call('HGET', KEYS[1], key) or '') ~= ARGV[2] then return 0 end
if ARGV[5] == '1' and redis.call('EXISTS', KEYS[6]) == 0 then return 0 end
for k = 2, 4 do redis.call('UNLINK', KEYS[k]) end
dropSteps(KEYS[5])
if ARGV[5] == '1' then
  redis.call('RENAME', KEYS[6], KEYS[2])
  redis.call('PERSIST', KEYS[2])
end
if ARGV[4] ~= '' then redis.call('SET', KEYS[3], ARGV[4]) end
if ARGV[6] ~= '' then redis.call('HSET', KEYS[8], key, ARGV[6]) else redis.call('HDEL', KEYS[8], key) end
local at = 8
for _ = 1, n do
  redis.call('XADD', KEYS[4], ARGV[at], 'op', ARGV[at + 1], 'delta', ARGV[at + 2], 'after', ARGV[at + 3], 'reason', ARGV[at + 4], 'by', ARGV[at + 5])
  at = at + 6
end
redis.call('UNLINK', KEYS[7])
local counts = tonumber(ARGV[at])
for i = at + 1, at + 2 * counts, 2 do redis.call('HSET', KEYS[7], ARGV[i], ARGV[i + 1]) end
at = at + 1 + 2 * counts
for k = 10, #KEYS do
  redis.call('UNLINK', KEYS[k])
  if ARGV[at] ~= '' then
    redis.call('SET', KEYS[k], ARGV[at])
    redis.call('PEXPIRE', KEYS[k], ARGV[at + 1])
  end
  at = at + 2
end
local clock, last = redis.call('TIME'), 0
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
for i = at, #ARGV, 3 do
  local left = tonumber(ARGV[i + 2]) - now
  if left > 0 then
    redis.call('SET', stepKey(KEYS[5], ARGV[i]), ARGV[i + 1])
    redis.call('PEXPIRE', stepKey(KEYS[5], ARGV[i]), string.format('%.0f', left))
    redis.call('ZADD', KEYS[5], ARGV[i + 2], ARGV[i])
    last = math.max(last, left)
  end
end
if last > 0 then redis.call('PEXPIRE', KEYS[5], string.format('%.0f', last)) end
redis.call('HSET', KEYS[1], key, ARGV[3])
for _, field in ipairs(redis.call('HKEYS', KEYS[9])) do
  if field == 'log' or string.sub(field, 1, 5) == 'from:' then redis.call('HDEL', KEYS[9], field) end
end
return 1
