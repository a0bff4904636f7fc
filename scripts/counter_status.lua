-- counter_status.lua: what buckets know of PostgreSQL behind them.
--
-- KEYS     hc:{n}:s of each bucket
-- Returns  a list, per bucket: generation (0: none), 1 when it was found good on this run of the server, epoch,
--          the epoch that was taken (0: none), since when it has changes that are not persisted (0: none) as a
--          text, left, the time, until when identities are looked for behind, highest incarnation deleted,
--          the least incarnation of a counter that changes
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
