-- counter_drain.lua: read counters of a checkpoint as they were when it began, regardless of later changes.
--
-- KEYS     hc:{n}:c, :s, :d, :t; then for each counter its ledger, registers, members, history and dimensions, and the keys
--          with the checkpoint's version of these four
-- ARGV     the generation; the number of the checkpoint; keys of counters
-- Returns  for each counter a list: its state, with the prefix x if it was deleted first; ledger entries; registers or "";
--          number of fields in the journal of members; completed time buckets; number of fields with counts of
--          dimensions. Or 0: the checkpoint does not have the counter. Or "lost"
-- Safe to repeat and to arrive late, because it checks the generation and the checkpoint. O(counters and entries).
--#include counter_front.lua

local f = redis.call('HMGET', KEYS[2], 'generation', 'taken')
if f[1] ~= ARGV[1] or f[2] ~= ARGV[2] then return 'lost' end
-- This deletes nothing, but Redis refuses only the first write of a script when its memory is full, and HDEL is
-- permitted then.
redis.call('HDEL', KEYS[4], '')
local out = {}
for i = 3, #ARGV do
  local key, at = ARGV[i], 9 * i - 22
  fix(KEYS[1], KEYS[4], key, redis.call('HGET', KEYS[1], key) or '-')
  local state, row = redis.call('HGET', KEYS[4], key), 0
  if state and redis.call('HGET', KEYS[3], key) == 'x' then
    row = {'x-', {}, '', 0, {}, 0} -- deleted since the checkpoint, together with its ledger
  elseif state then
    local last, entries, registers = string.match(state, '^%S+ %S+ %S+ %S+ %S+ (%d+)'), {}, ''
    if last and last ~= '0' then entries = redis.call('XRANGE', KEYS[at], '-', last) end
    if string.match(state, '^x?unique ') then registers = redis.call('GET', KEYS[at + 5]) or redis.call('GET', KEYS[at + 1]) or '' end
    row = {state, entries, registers, redis.call('HLEN', KEYS[at + 6]), redis.call('HGETALL', KEYS[at + 7]), redis.call('HLEN', KEYS[at + 8])}
  end
  out[i - 2] = row
end
return out
