-- rows_claim.lua: make a process the owner of partitions of rows. From then on, commits under older epochs are refused.
--
-- KEYS     {r}:o of each partition (hash: epoch, owner, number, published), see README.md
-- ARGV[1]  the owner; then for each partition the epoch of the owner's former claim, or 0
-- Returns  {epoch, number of the newest commit} for each partition. The epoch is 0 if another process has a newer claim
--          than the former one; then nothing changes. A malformed epoch is returned unchanged.
-- Safe to repeat: the process that owns a partition may claim it again, and gets a greater epoch. O(partitions).

local owner = ARGV[1]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

-- claim returns the epoch of a new claim, or 0.
local function claim(key, former, is)
  local epoch = tonumber(is.epoch)
  if not epoch then return is.epoch end

  local overtaken = former > 0 and epoch > former
  if overtaken and is.owner ~= owner then return '0' end

  -- If the former epoch is greater than the one in Redis, Redis has lost it.
  local new = string.format('%.0f', math.max(now, epoch + 1, former + 1))
  redis.call('HSET', key, 'epoch', new, 'owner', owner, 'number', is.number)

  return new
end

local claims = {}
for i, key in ipairs(KEYS) do
  local is = redis.call('HMGET', key, 'epoch', 'owner', 'number')
  local state = {epoch = is[1] or '0', owner = is[2], number = is[3] or '0'}

  claims[i] = {claim(key, tonumber(ARGV[i + 1]), state), state.number}
end

return claims
