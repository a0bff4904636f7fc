-- counter_stage.lua: put members into a set that is being loaded.
--
-- KEYS[1]  hc:{n}:y:<load>   ARGV[1]  how long it stays when nobody goes on, ms   ARGV[2]  members in it before
-- ARGV[3…] members
-- Returns  members in it now
-- Safe to repeat: adding is idempotent, and the number is only a hint for its parts. O(members).
--#include counter_set.lua

local set, size = openSet(KEYS[1]), tonumber(ARGV[2])
for i = 3, #ARGV do
  if join(set, ARGV[i], size) then size = size + 1 end
end
keepSet(set)
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return size
