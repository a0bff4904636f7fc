-- counter_stage.lua: add members to a set that is being loaded, outside its counter.
--
-- KEYS[1]  hc:{n}:y:<load>   ARGV[1]  ms until it expires   ARGV[2]  number of members in it
-- ARGV[3…] members
-- Returns  the new number of members
-- Safe to repeat: additions are idempotent, and the number only decides when the set grows. O(members).
--#include counter_set.lua

local set, size = openSet(KEYS[1]), tonumber(ARGV[2])
for i = 3, #ARGV do
  if join(set, ARGV[i], size) then size = size + 1 end
end
keepSet(set)
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return size
