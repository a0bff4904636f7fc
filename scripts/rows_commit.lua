-- rows_commit.lua: make commits of rows. Each is made only if the caller owns the partition and Redis has the previous
-- commit.
--
-- KEYS     for each commit {r}:o (hash, see rows_claim.lua), its IDs (strings: expiry, unix ms; the keys expire), then
--          the collections of its rows (hashes)
-- ARGV[1]  PUBLISH or SPUBLISH; then for each commit:
--          its number of KEYS and of ARGV; epoch, previous number, number, time (unix ms); a channel, or '' to publish
--          nothing, and the publication; the number of IDs, and for each its expiry and the ms until then, or 0 if it
--          is only asked for; the number of collections, and for each the number of arguments to put and to delete,
--          fields and values to put, fields to delete
-- Returns  for each commit {'made'}, or why it was refused: {'fenced', epoch}, {'lost', number},
--          {'known', position of a remembered ID, its expiry, position, expiry, …}
-- Safe to repeat: a commit that Redis already has is not made again. O(rows and IDs).

local chunk = 4000 -- arguments of one command: Lua's stack has room for 8,000

-- known returns the IDs that are remembered at a time, of n IDs that begin at KEYS[key].
local function known(key, n, at)
  local found = {'known'}
  for first = 0, n - 1, chunk do
    local last = math.min(first + chunk, n) - 1
    for i, ends in ipairs(redis.call('MGET', unpack(KEYS, key + first, key + last))) do
      -- A malformed expiry is returned, too, so that the caller reports it.
      if ends and (tonumber(ends) or math.huge) > at then
        found[#found + 1] = first + i - 1
        found[#found + 1] = ends
      end
    end
  end

  return found
end

-- call calls a command on a key with n arguments of ARGV, in several calls if there are many.
local function call(command, key, arg, n)
  for first = arg, arg + n - 1, chunk do
    local last = math.min(first + chunk, arg + n) - 1
    redis.call(command, key, unpack(ARGV, first, last))
  end
end

-- write puts and deletes rows of n collections, whose arguments begin at ARGV[arg].
local function write(key, arg, n)
  for collection = key, key + n - 1 do
    local puts, deletes = ARGV[arg], ARGV[arg + 1]
    arg = arg + 2

    call('HSET', KEYS[collection], arg, puts)
    arg = arg + puts

    call('HDEL', KEYS[collection], arg, deletes)
    arg = arg + deletes
  end
end

-- remember writes n IDs, whose arguments begin at ARGV[arg].
local function remember(key, arg, n)
  for i = 0, n - 1 do
    local ends, lasts = ARGV[arg + 2 * i], ARGV[arg + 2 * i + 1]
    if lasts ~= '0' then redis.call('SET', KEYS[key + i], ends, 'PX', lasts) end
  end
end

-- commit makes the commit that begins at KEYS[key] and ARGV[arg].
local function commit(key, arg)
  local owner, epoch, after, number, at, channel, publication, ids = KEYS[key], unpack(ARGV, arg, arg + 6)
  local is = redis.call('HMGET', owner, 'epoch', 'number', 'published')
  if is[1] ~= epoch then return {'fenced', is[1] or '0'} end
  if is[2] == number then return {'made'} end
  if is[2] ~= after then return {'lost', is[2] or '0'} end

  ids = tonumber(ids)
  local found = known(key + 1, ids, tonumber(at))
  if #found > 1 then return found end

  -- The number comes last. If a command before it fails, for example because a key of a collection is no hash, Redis
  -- does not have the commit, and the repetition writes everything again. IDs come after the rows, because the
  -- repetition would find them. A full Redis refuses the first command that takes memory, and only that one.
  write(key + 1 + ids, arg + 8 + 2 * ids, tonumber(ARGV[arg + 7 + 2 * ids]))
  remember(key + 1, arg + 7, ids)

  -- A publication includes the number of the previous one, so a reader that misses one sees the gap.
  local published = is[3] or '0'
  if channel ~= '' then
    redis.call(ARGV[1], channel, number .. ' ' .. published .. ' ' .. publication)
    published = number
  end
  redis.call('HSET', owner, 'number', number, 'published', published)

  return {'made'}
end

local results = {}
local key, arg = 1, 2
while KEYS[key] do
  results[#results + 1] = commit(key, arg + 2)
  key, arg = key + ARGV[arg], arg + ARGV[arg + 1]
end

return results
