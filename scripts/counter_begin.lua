-- counter_begin.lua: begin a generation in a bucket, or confirm its generation on this run of the server. No script serves
-- a bucket that is not confirmed.
--
-- KEYS     hc:{n}:c, :s, :d, :t, :j, :a, :u
-- ARGV[1]  begin: empty the bucket and begin a generation
--          confirm: PostgreSQL has the generation that has just begun
--          adopt: keep the bucket, which is complete but may lack the last acknowledged changes
-- ARGV[2]  the generation
-- ARGV[3]  begin: the highest incarnation that was deleted   adopt: the lowest incarnation of counters that change from
--          now on, so that their versions are newer than those that may have been lost
-- ARGV[4]  until when unknown idempotency keys have to be looked up in PostgreSQL, ms   ARGV[5] prefix of the bucket's keys
-- ARGV[6]  1: PostgreSQL has all counters of a bucket without a generation
-- Returns  1: done; 0: the bucket has a newer generation, or for adopt another one; -1: the bucket belongs to a store with
--          other regions, whose counters exist nowhere else; -2: it has counters that PostgreSQL does not have
-- Safe to repeat and to arrive late, because a generation begins once. begin makes the keys that it deletes, all in the
-- bucket's slot, because only the bucket knows its counters. O(size of the bucket).
--#include counter_steps.lua

local run = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
local is = redis.call('HGET', KEYS[2], 'generation')
if ARGV[1] == 'adopt' then
  if is ~= ARGV[2] then return 0 end
  redis.call('HSET', KEYS[2], 'run', run, 'life', ARGV[3])
  return 1
end
if ARGV[1] == 'confirm' then
  if is ~= ARGV[2] then return 0 end
  redis.call('HSETNX', KEYS[2], 'run', run) -- a later run may have lost changes, and needs adopt
  return 1
end
if not is and redis.call('HEXISTS', KEYS[2], 'region') == 1 then return -1 end
if not is and ARGV[6] ~= '1' and redis.call('HLEN', KEYS[1]) > 0 then return -2 end
if is and tonumber(is) > tonumber(ARGV[2]) then return 0 end
if is == ARGV[2] then return 1 end
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
redis.call('HSET', KEYS[2], 'generation', ARGV[2], 'epoch', 1, 'left', 0, 'deleted', ARGV[3], 'asks', ARGV[4], 'told', told or 0)
return 1
