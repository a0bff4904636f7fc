-- counter_status.lua: read the state of buckets of the cache tier.
--
-- KEYS     hc:{n}:s of each bucket
-- Returns  for each bucket a list, with 0 for none: generation; 1 if it was checked on this run of the server; number of the
--          next checkpoint; number of the checkpoint that is being drained; time of the oldest change that is not
--          persisted, as text; number of evictions; the time now; until when unknown idempotency keys are looked up in
--          PostgreSQL; highest incarnation that was deleted; lowest incarnation of a counter that changes
-- It writes nothing. O(buckets).

local run = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
local clock = redis.call('TIME')
local out = {}
for i, key in ipairs(KEYS) do
  local f = redis.call('HMGET', key, 'generation', 'run', 'epoch', 'taken', 'since', 'takensince', 'left', 'asks', 'deleted', 'life')
  out[i] = {f[1] or '0', f[2] == run and 1 or 0, f[3] or '0', f[4] or '0', f[6] or f[5] or '0', f[7] or '0',
    string.format('%.0f', clock[1] * 1000 + math.floor(clock[2] / 1000)), f[8] or '0', f[9] or '0', f[10] or '0'}
end
return out
