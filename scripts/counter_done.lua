-- counter_done.lua: forget counters of a cut that is persisted.
--
-- KEYS     hc:{n}:s, :c, :t, :w, :u; then per counter its ledger, its old ledger, what became of its members, its
--          old registers, what it gained in steps that are over, what it counted
-- ARGV     the generation; the epoch that ended; keys of counters
-- Returns  counters of the cut that are left. When there are none the cut is over.
-- Safe to repeat and to arrive late: generation and epoch say so. O(counters).

local f = redis.call('HMGET', KEYS[1], 'generation', 'taken')
if f[1] ~= ARGV[1] or f[2] ~= ARGV[2] then return 0 end
for i = 3, #ARGV do
  local key, at = ARGV[i], 6 * i - 12
  if redis.call('HDEL', KEYS[3], key) == 1 then
    local state = redis.call('HGET', KEYS[4], key) or redis.call('HGET', KEYS[2], key) or '-'
    local last = string.match(state, '^%S+ %S+ %S+ %S+ %S+ (%d+)')
    if redis.call('EXISTS', KEYS[at + 1]) == 1 then
      redis.call('UNLINK', KEYS[at + 1])
    elseif last and last ~= '0' then
      redis.call('XTRIM', KEYS[at], 'MINID', string.format('%.0f', tonumber(last) + 1))
      if redis.call('XLEN', KEYS[at]) == 0 then redis.call('UNLINK', KEYS[at]) end
    end
    redis.call('UNLINK', KEYS[at + 2], KEYS[at + 3], KEYS[at + 4], KEYS[at + 5])
    redis.call('HDEL', KEYS[4], key)
  end
end
local left = redis.call('HLEN', KEYS[3])
if left == 0 then
  redis.call('UNLINK', KEYS[4], KEYS[5])
  redis.call('HDEL', KEYS[1], 'taken', 'takensince')
end
return left
