-- counter_acknowledge.lua: forget counters of a checkpoint that is persisted.
--
-- KEYS     hc:{n}:s, :d, :t, :u; then per counter its ledger, and where its registers, members, history and dimensions are
--          set aside
-- ARGV     the generation; the number of the checkpoint; keys of counters
-- Returns  counters of the checkpoint that are left. When there are none it is over.
-- Safe to repeat and to arrive late: generation and checkpoint say so. O(counters).

local f = redis.call('HMGET', KEYS[1], 'generation', 'taken')
if f[1] ~= ARGV[1] or f[2] ~= ARGV[2] then return 0 end
for i = 3, #ARGV do
  local key, at = ARGV[i], 5 * i - 10
  local state = redis.call('HGET', KEYS[3], key)
  if state then
    local last = string.match(state, '^%S+ %S+ %S+ %S+ %S+ (%d+)')
    if last and last ~= '0' and redis.call('HGET', KEYS[2], key) ~= 'x' then -- else the ledger is of its next life
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
