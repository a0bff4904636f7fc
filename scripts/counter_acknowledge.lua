-- counter_acknowledge.lua: drop counters of a checkpoint that PostgreSQL has.
--
-- KEYS     as those of counter_drain.lua; then hc:{n}:u
-- ARGV     the generation; the number of the checkpoint; keys of counters
-- Returns  how many counters the checkpoint still has. At 0 it ends.
-- Safe to repeat and to arrive late, because it checks the generation and the checkpoint. O(counters).

local f = redis.call('HMGET', KEYS[2], 'generation', 'taken')
if f[1] ~= ARGV[1] or f[2] ~= ARGV[2] then return 0 end
for i = 3, #ARGV do
  local key, at = ARGV[i], 9 * i - 22
  local state = redis.call('HGET', KEYS[4], key)
  if state then
    if state == '' or state == 'x' then -- in a Redis that came back with older data, from before the drain fixed it
      state = redis.call('HGET', KEYS[1], key) or '-'
      redis.call('UNLINK', KEYS[at + 2], KEYS[at + 3], KEYS[at + 4])
    end
    local last = string.match(state, '^%S+ %S+ %S+ %S+ %S+ (%d+)')
    if last and last ~= '0' and redis.call('HGET', KEYS[3], key) ~= 'x' then -- otherwise the ledger belongs to a new incarnation
      redis.call('XTRIM', KEYS[at], 'MINID', string.format('%.0f', tonumber(last) + 1))
      if redis.call('XLEN', KEYS[at]) == 0 then redis.call('UNLINK', KEYS[at]) end
    end
    redis.call('UNLINK', KEYS[at + 5], KEYS[at + 6], KEYS[at + 7], KEYS[at + 8])
    redis.call('HDEL', KEYS[4], key)
  end
end
local left = redis.call('HLEN', KEYS[4])
if left == 0 then
  redis.call('UNLINK', KEYS[#KEYS])
  redis.call('HDEL', KEYS[2], 'taken', 'takensince')
end
return left
