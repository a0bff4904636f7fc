-- counter_claim.lua: note that PostgreSQL is about to decide under an identity, unless the identity is remembered.
--
-- KEYS[1]  hc:{n}:i:<identity>   KEYS[2]  hc:{n}:k:<identity>
-- ARGV[1]  who claims it         ARGV[2]  how long the claim stays when nobody ends it, ms
-- Returns  1 when the identity is remembered: then nothing is noted; else 0
-- Safe to repeat. One that arrives late is ended by who meets it. O(1).

if redis.call('EXISTS', KEYS[1]) == 1 then return 1 end
local clock = redis.call('TIME')
redis.call('HSET', KEYS[2], ARGV[1], string.format('%.0f', clock[1] * 1000 + math.floor(clock[2] / 1000)))
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return 0
