-- counter_take.lua: read counters of a cut, as they were then.
--
-- KEYS     hc:{n}:c, hc:{n}:w; then per counter its ledger, its old ledger, what became of its members
-- ARGV     their keys
-- Returns  a list, per counter: its state; its entries that are not persisted; how many members moved, and 1 for a reset
-- It writes nothing. O(counters and entries).

local out = {}
for i, key in ipairs(ARGV) do
  local state = redis.call('HGET', KEYS[2], key) or redis.call('HGET', KEYS[1], key) or '-'
  local last, entries = string.match(state, ' (%d+)$'), {}
  if last and last ~= '0' then
    local ledger = KEYS[3 * i]
    if redis.call('EXISTS', KEYS[3 * i + 1]) == 1 then ledger = KEYS[3 * i + 1] end
    entries = redis.call('XRANGE', ledger, '-', last)
  end
  out[i] = {state, entries, redis.call('HLEN', KEYS[3 * i + 2])}
end
return out
