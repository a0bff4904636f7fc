-- counter_evict.lua: let counters of a bucket go that nobody touched for long, or that are named.
--
-- KEYS     the six of the bucket
-- ARGV     how long, ms; how many at most; what names of the bucket begin with; of named ones, in a bucket that the caller
--          holds still, PUBLISH or SPUBLISH, the channel, and their keys: their rows were replaced, so watchers read anew
-- Returns  how many went; -1 when a named one stays
-- Safe to repeat: what is dirty or on its way to PostgreSQL stays. The names of sets are made here, in the
-- bucket's slot. O(counters).
--#include counter_steps.lua

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local named = #ARGV > 3
if redis.call('HEXISTS', KEYS[2], 'generation') == 0 then return 0 end
local old, gone = {unpack(ARGV, 6)}, 0
if not named then old = redis.call('ZRANGEBYSCORE', KEYS[6], '-inf', string.format('%.0f', now - ARGV[1]), 'LIMIT', 0, ARGV[2]) end
for _, key in ipairs(old) do
  if redis.call('HEXISTS', KEYS[3], key) + redis.call('HEXISTS', KEYS[4], key) == 0 then
    redis.call('ZREM', KEYS[6], key)
    redis.call('HDEL', KEYS[1], key)
    redis.call('UNLINK', ARGV[3] .. 'm:' .. key, ARGV[3] .. 'r:' .. key, ARGV[3] .. 'l:' .. key)
    dropSteps(ARGV[3] .. 'v:' .. key)
    gone = gone + 1
  end
end
if gone > 0 then redis.call('HINCRBY', KEYS[2], 'left', gone) end
if not named then return gone end
redis.call('HINCRBY', KEYS[2], 'left', 1) -- also for one that is on its way here
local told = redis.call('HINCRBY', KEYS[2], 'told', 3)
redis.call(ARGV[4], ARGV[5], string.format('%.0f', told - 2))
redis.call(ARGV[4], ARGV[5], string.format('%.0f', told)) -- a gap
return gone == #old and gone or -1
