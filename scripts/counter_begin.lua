-- counter_begin.lua: begin a generation in a bucket, or find the bucket good on this run of the server.
--
-- KEYS     the six of the bucket, hc:{n}:u
-- ARGV     adopt or begin; the generation; begin: highest incarnation that was deleted, adopt: least incarnation of a counter
--          that changes from now on, since this run may have lost versions that were told; until when identities that
--          are not known are to be looked for, ms; what names of the bucket begin with; 1 when PostgreSQL
--          has all counters of a bucket without a generation
-- Returns  1; -2 when the bucket has no generation, but counters that nobody has carried into PostgreSQL; 0 when the bucket is of a newer generation, or, for adopt, of another; -1 when no front has been there
--          but a region with others, whose counters are nowhere else
-- Safe to repeat and to arrive late: a generation begins once. begin removes all there is of the bucket; its
-- names are made here, all in its slot, because only the bucket knows them. O(what is in the bucket).
--#include counter_steps.lua

local run = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
local is = redis.call('HGET', KEYS[2], 'generation')
if ARGV[1] == 'adopt' then
  if is ~= ARGV[2] then return 0 end
  redis.call('HSET', KEYS[2], 'run', run, 'life', ARGV[3])
  return 1
end
if not is and redis.call('HEXISTS', KEYS[2], 'region') == 1 then return -1 end
if not is and ARGV[6] ~= '1' and redis.call('HLEN', KEYS[1]) > 0 then return -2 end
if is and tonumber(is) > tonumber(ARGV[2]) then return 0 end
if is == ARGV[2] then
  redis.call('HSET', KEYS[2], 'run', run)
  return 1
end
for _, from in ipairs({1, 3, 4}) do
  for _, key in ipairs(redis.call('HKEYS', KEYS[from])) do
    local names = {}
    for i, name in ipairs({'m', 'r', 'rt', 'l', 'p', 'pt', 'b', 'bt', 'e', 'et'}) do names[i] = ARGV[5] .. name .. ':' .. key end
    redis.call('UNLINK', unpack(names))
    dropSteps(ARGV[5] .. 'v:' .. key)
  end
end
for _, from in ipairs({5, 7}) do
  for _, id in ipairs(redis.call('LRANGE', KEYS[from], 0, -1)) do redis.call('UNLINK', ARGV[5] .. 'i:' .. id) end
end
local told = redis.call('HGET', KEYS[2], 'told')
redis.call('UNLINK', unpack(KEYS))
redis.call('HSET', KEYS[2], 'generation', ARGV[2], 'run', run, 'epoch', 1, 'left', 0, 'deleted', ARGV[3], 'asks', ARGV[4], 'told', told or 0)
return 1
