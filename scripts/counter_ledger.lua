-- counter_ledger.lua: read the entries of a counter that are not persisted.
--
-- KEYS     hc:{n}:c, hc:{n}:s, hc:{n}:d, hc:{n}:t, the ledger
-- ARGV     its key; the first entry; how many at most
-- Returns  its state or ""; 1 when PostgreSQL has entries of an earlier life at most; entries. Or "lost".
-- It writes nothing. O(entries).
--#include counter_front.lua

if not front(KEYS[2]) then return 'lost' end
local state = redis.call('HGET', KEYS[1], ARGV[1]) or ''
return {state, wasDeleted(KEYS[3], KEYS[4], ARGV[1]) and 1 or 0, redis.call('XRANGE', KEYS[5], ARGV[2], '+', 'COUNT', ARGV[3])}
