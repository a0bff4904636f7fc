-- counter_front.lua: what a bucket knows of PostgreSQL behind it. It is no script: it is included.

-- run is this run of this server, so that a restart or a failover is noticed.
local run

-- front is the bucket's part, or nil when the bucket may have lost its memory: it has no
-- generation, or was not found good since the server started.
local function front(state)
  run = run or string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
  local f = redis.call('HMGET', state, 'generation', 'run', 'epoch', 'asks', 'left', 'pending', 'life')
  if not f[1] or f[2] ~= run then return nil end
  return {
    generation = tonumber(f[1]), epoch = tonumber(f[3]), parity = tonumber(f[3]) % 2 + 1, asks = tonumber(f[4]),
    ticket = f[1] .. ' ' .. f[5], pending = tonumber(f[6] or 0),
    life = math.max(tonumber(f[1]), tonumber(f[7] or 0)), -- the least incarnation of a counter that changes
  }
end
