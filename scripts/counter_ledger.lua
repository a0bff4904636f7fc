-- counter_ledger.lua: read the ledger entries of a counter that PostgreSQL does not have.
--
-- KEYS     hc:{n}:c, hc:{n}:s, hc:{n}:d, hc:{n}:t, the ledger
-- ARGV     the counter's key; the first entry; maximum number of entries
-- Returns  its state or ""; 1 if the entries in PostgreSQL, if any, are of an earlier incarnation; entries. Or "lost"
-- It writes nothing. O(entries).
--#include counter_front.lua

if not front(KEYS[2]) then return 'lost' end
local state = redis.call('HGET', KEYS[1], ARGV[1]) or ''
return {state, wasDeleted(KEYS[3], KEYS[4], ARGV[1]) and 1 or 0, redis.call('XRANGE', KEYS[5], ARGV[2], '+', 'COUNT', ARGV[3])}
