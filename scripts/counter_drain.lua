-- counter_drain.lua: read counters of a checkpoint, as they were when it began, whatever changed meanwhile.
--
-- KEYS     hc:{n}:c, :s, :d, :t; then per counter its ledger, its registers, its members, history and dimensions, and where
--          these four are set aside
-- ARGV     the generation; the number of the checkpoint; keys of counters
-- Returns  a list, per counter: its state, after x if it was deleted before; entries of its ledger that are not
--          persisted; its registers or ""; how many members changed, and 1 for a reset; what it gained; under how many
--          values it counted. Or 0: it is not in the checkpoint. Or "lost".
-- Safe to repeat and to arrive late: generation and checkpoint say so. O(counters and entries).
--#include counter_front.lua

local f = redis.call('HMGET', KEYS[2], 'generation', 'taken')
if f[1] ~= ARGV[1] or f[2] ~= ARGV[2] then return 'lost' end
redis.call('HDEL', KEYS[4], '') -- it is no counter, but after a first write Redis refuses none, also when its memory is full
local out = {}
for i = 3, #ARGV do
  local key, at = ARGV[i], 9 * i - 22
  fix(KEYS[1], KEYS[4], key, redis.call('HGET', KEYS[1], key) or '-')
  local state, row = redis.call('HGET', KEYS[4], key), 0
  if state and redis.call('HGET', KEYS[3], key) == 'x' then
    row = {'x-', {}, '', 0, {}, 0} -- it was deleted since, and its ledger with it
  elseif state then
    local last, entries, registers = string.match(state, '^%S+ %S+ %S+ %S+ %S+ (%d+)'), {}, ''
    if last and last ~= '0' then entries = redis.call('XRANGE', KEYS[at], '-', last) end
    if string.match(state, '^x?unique ') then registers = redis.call('GET', KEYS[at + 5]) or redis.call('GET', KEYS[at + 1]) or '' end
    row = {state, entries, registers, redis.call('HLEN', KEYS[at + 6]), redis.call('HGETALL', KEYS[at + 7]), redis.call('HLEN', KEYS[at + 8])}
  end
  out[i - 2] = row
end
return out
