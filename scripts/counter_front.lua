-- counter_front.lua: what a bucket knows of PostgreSQL behind it. It is no script: it is included.

-- run is this run of this server, so that a restart or a failover is noticed.
local run

-- front is the bucket's part, or nil when the bucket may have lost its memory: it has no
-- generation, or was not found good since the server started.
local function front(state)
  run = run or string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
  local f = redis.call('HMGET', state, 'generation', 'run', 'asks', 'left', 'pending', 'life')
  if not f[1] or f[2] ~= run then return nil end
  return {
    generation = tonumber(f[1]), asks = tonumber(f[3]), ticket = f[1] .. ' ' .. f[4], pending = tonumber(f[5] or 0),
    life = math.max(tonumber(f[1]), tonumber(f[6] or 0)), -- the least incarnation of a counter that changes
  }
end

-- JOURNALS are what changed of a counter since the last checkpoint: members, history, dimensions. Their keys, and those
-- where a checkpoint sets them aside, are made here, in the slot of the bucket.
local JOURNALS = {'p', 'b', 'e'}
local function journalKey(counters, name, key) return string.sub(counters, 1, -2) .. name .. ':' .. key end

-- fix keeps a counter as the checkpoint that is being persisted has it. It is called before the counter changes for the
-- first time since, or when it is drained: so values, and the identities of who changed them, are of one moment.
local function fix(counters, taken, key, state)
  local flag = redis.call('HGET', taken, key)
  if flag ~= '' and flag ~= 'x' then return end
  redis.call('HSET', taken, key, flag .. state)
  for _, name in ipairs(JOURNALS) do
    local journal = journalKey(counters, name, key)
    if redis.call('EXISTS', journal) == 1 then redis.call('RENAME', journal, journalKey(counters, name .. 't', key)) end
  end
end

-- keepRegisters keeps the registers of a unique as the checkpoint that is being persisted has them. It is called before they
-- change. When there are none, after a reset, that is kept.
local function keepRegisters(counters, taken, key)
  local aside = journalKey(counters, 'rt', key)
  if redis.call('HEXISTS', taken, key) == 1 and redis.call('EXISTS', aside) == 0
    and redis.call('COPY', journalKey(counters, 'r', key), aside) == 0 then
    redis.call('SET', aside, '')
  end
end

-- wasDeleted reports whether a counter was deleted since PostgreSQL learned of it: of an earlier life it has the rows.
local function wasDeleted(dirty, taken, key)
  return redis.call('HGET', dirty, key) == 'x' or string.sub(redis.call('HGET', taken, key) or '', 1, 1) == 'x'
end
