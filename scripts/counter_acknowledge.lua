-- counter_acknowledge.lua: drop counters of a checkpoint that PostgreSQL has.
--
-- KEYS     hc:{n}:s, :d, :t, :u; then for each counter its ledger, and the keys with the checkpoint's registers, members,
--          history and dimensions
-- ARGV     the generation; the number of the checkpoint; keys of counters
-- Returns  how many counters the checkpoint still has. At 0 it ends.
-- Safe to repeat and to arrive late, because it checks the generation and the checkpoint. O(counters).

local f = redis.call('HMGET', KEYS[1], 'generation', 'taken')
if f[1] ~= ARGV[1] or f[2] ~= ARGV[2] then return 0 end
for i = 3, #ARGV do
  local key, at = ARGV[i], 5 * i - 10
  local state = redis.call('HGET', KEYS[3], key)
  if state then
    local last = string.match(state, '^%S+ %S+ %S+ %S+ %S+ (%d+)')
    if last and last ~= '0' and redis.call('HGET', KEYS[2], key) ~= 'x' then -- otherwise the ledger belongs to a new incarnation
      redis.call('XTRIM', KEYS[at], 'MINID', string.format('%.0f', tonumber(last) + 1))
      if redis.call('XLEN', KEYS[at]) == 0 then redis.call('UNLINK', KEYS[at]) end
    end
    redis.call('UNLINK', KEYS[at + 1], KEYS[at + 2], KEYS[at + 3], KEYS[at + 4])
    redis.call('HDEL', KEYS[3], key)
  end
end
local left = redis.call('HLEN', KEYS[3])
if left == 0 then
  redis.call('UNLINK', KEYS[4])
  redis.call('HDEL', KEYS[1], 'taken', 'takensince')
end
return left
