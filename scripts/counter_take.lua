-- counter_take.lua: read counters of a cut, as they were then.
--
-- KEYS     hc:{n}:c, hc:{n}:w; then per counter its ledger, its old ledger, what became of its members, its
--          registers, its old registers, what it gained in steps that are over, what it counted
-- ARGV     their keys
-- Returns  a list, per counter: its state; its entries that are not persisted; how many members moved, and 1 for a reset;
--          its registers or ""; what it gained; under how many values it counted
-- It writes nothing. O(counters and entries).

local out = {}
for i, key in ipairs(ARGV) do
  local at = 7 * i - 4
  local shadow = redis.call('HGET', KEYS[2], key)
  local state = shadow or redis.call('HGET', KEYS[1], key) or '-'
  local last, entries = string.match(state, '^%S+ %S+ %S+ %S+ %S+ (%d+)'), {}
  if last and last ~= '0' then
    local ledger = KEYS[at]
    if redis.call('EXISTS', KEYS[at + 1]) == 1 then ledger = KEYS[at + 1] end
    entries = redis.call('XRANGE', ledger, '-', last)
  end
  local registers = string.sub(state, 1, 7) == 'unique ' and redis.call('GET', KEYS[shadow and at + 4 or at + 3]) or ''
  out[i] = {state, entries, redis.call('HLEN', KEYS[at + 2]), registers, redis.call('HGETALL', KEYS[at + 5]),
    redis.call('HLEN', KEYS[at + 6])}
end
return out
