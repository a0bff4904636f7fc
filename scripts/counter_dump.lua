-- counter_dump.lua: read a counter with everything that Redis keeps of it but its ledger, which may be long, in a Redis
-- without PostgreSQL.
--
-- KEYS     hc:{n}:c, hc:{n}:f; the counter's members, registers, counts of dimensions, and list of time buckets of a unique;
--          then its histories
-- ARGV[1]  the counter's key
-- Returns  its state or ""; its field of hc:{n}:f or ""; the fields of its members; registers or ""; the fields of its
--          dimensions; for each time bucket of a unique step:index and registers; its histories
-- It writes nothing. O(size of the counter).
--#include counter_steps.lua

local seen, histories = {}, {}
for _, name in ipairs(redis.call('ZRANGE', KEYS[6], 0, -1)) do
  local registers = redis.call('GET', stepKey(KEYS[6], name))
  if registers then -- otherwise it has expired
    seen[#seen + 1] = name
    seen[#seen + 1] = registers
  end
end
for k = 7, #KEYS do histories[k - 6] = redis.call('GET', KEYS[k]) or '' end
return {
  redis.call('HGET', KEYS[1], ARGV[1]) or '', redis.call('HGET', KEYS[2], ARGV[1]) or '',
  redis.call('HGETALL', KEYS[3]), redis.call('GET', KEYS[4]) or '', redis.call('HGETALL', KEYS[5]), seen, histories,
}
