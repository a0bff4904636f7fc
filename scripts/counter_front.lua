-- counter_front.lua: a bucket of the cache tier in front of PostgreSQL. Other scripts include this file; it does not
-- run by itself. Package tiered explains generations and checkpoints.

-- run is the run_id of this server, which changes with a restart or a failover.
local run

-- front returns what the bucket notes of the cache tier, or nil when the bucket may have lost data: it has no
-- generation, or no process has checked it since this server started.
local function front(state)
  run = run or string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
  local f = redis.call('HMGET', state, 'generation', 'run', 'asks', 'left', 'pending', 'life')
  if not f[1] or f[2] ~= run then return nil end
  return {
    generation = tonumber(f[1]), asks = tonumber(f[3]), ticket = f[1] .. ' ' .. f[4], pending = tonumber(f[5] or 0),
    least = math.max(tonumber(f[1]), tonumber(f[6] or 0)), -- the lowest incarnation of a counter that changes
  }
end

-- JOURNALS has the prefixes of a counter's journals, which list the changes since the last checkpoint of members (p),
-- history (b) and dimensions (e). A checkpoint renames them to pt, bt and et. journalKey makes their keys, in the
-- bucket's slot.
local JOURNALS = {'p', 'b', 'e'}
local function journalKey(counters, name, key) return string.sub(counters, 1, -2) .. name .. ':' .. key end

-- fix preserves a counter for the checkpoint that is being drained. A checkpoint only renames the list of changed
-- counters; their states are copied here, before the counter's first change after that, or when it is drained. So all
-- values of a checkpoint, and the idempotency keys of the operations that led to them, belong to one moment. The flag '' or
-- 'x' means that no state has been copied yet; 'x' also means that the counter was deleted during the interval.
local function fix(counters, taken, key, state)
  local flag = redis.call('HGET', taken, key)
  if flag ~= '' and flag ~= 'x' then return end
  redis.call('HSET', taken, key, flag .. state)
  for _, name in ipairs(JOURNALS) do
    local journal = journalKey(counters, name, key)
    if redis.call('EXISTS', journal) == 1 then redis.call('RENAME', journal, journalKey(counters, name .. 't', key)) end
  end
end

-- keepRegisters preserves the registers of a unique for the checkpoint that is being drained. It must be called
-- before they change. An empty string stands for no registers, after a reset; otherwise a later call would copy newer
-- ones.
local function keepRegisters(counters, taken, key)
  local aside = journalKey(counters, 'rt', key)
  if redis.call('HEXISTS', taken, key) == 1 and redis.call('EXISTS', aside) == 0
    and redis.call('COPY', journalKey(counters, 'r', key), aside) == 0 then
    redis.call('SET', aside, '')
  end
end
