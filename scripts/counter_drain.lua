-- counter_drain.lua: read counters of a checkpoint, as they were when it began, whatever changed meanwhile; uniques alone
-- as they are now.
--
-- KEYS     hc:{n}:c, :s, :d, :t; then per counter its ledger, its registers, and where its members, history and
--          dimensions are set aside
-- ARGV     the generation; the number of the checkpoint; keys of counters
-- Returns  a list, per counter: its state, after x if it was deleted before; entries of its ledger that are not
--          persisted; its registers or ""; how many members changed, and 1 for a reset; what it gained; under how many
--          values it counted. Or 0: it is not in the checkpoint. Or "lost".
-- Safe to repeat and to arrive late: generation and checkpoint say so. O(counters and entries).
--#include counter_front.lua

local f = redis.call('HMGET', KEYS[2], 'generation', 'taken')
if f[1] ~= ARGV[1] or f[2] ~= ARGV[2] then return 'lost' end
local out = {}
for i = 3, #ARGV do
  local key, at = ARGV[i], 5 * i - 10
  fix(KEYS[1], KEYS[4], key, redis.call('HGET', KEYS[1], key) or '-')
  local state, entries = redis.call('HGET', KEYS[4], key), {}
  local last = state and string.match(state, '^%S+ %S+ %S+ %S+ %S+ (%d+)')
  if last and last ~= '0' and redis.call('HGET', KEYS[3], key) ~= 'x' then entries = redis.call('XRANGE', KEYS[at], '-', last) end
  local registers = ''
  if state and string.match(state, '^x?unique ') then -- registers only grow, so they may be newer, and the value with them
    registers = redis.call('GET', KEYS[at + 1]) or ''
    local value = string.format('%.0f', redis.call('PFCOUNT', KEYS[at + 1]))
    state = string.gsub(state, '^(x?unique )%S+', '%1' .. value)
  end
  out[i - 2] = state and {state, entries, registers, redis.call('HLEN', KEYS[at + 2]), redis.call('HGETALL', KEYS[at + 3]),
    redis.call('HLEN', KEYS[at + 4])} or 0
end
return out
