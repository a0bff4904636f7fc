-- counter_ledger.lua: read ledger entries of a counter.
--
-- KEYS     hc:{n}:c; in front also hc:{n}:s, :d and :t; then the ledger
-- ARGV     the counter's key; the first entry; maximum number of entries
-- Returns  its state or ""; 1 if PostgreSQL has no other entries; entries. In front perhaps "lost"
-- It writes nothing. O(entries).
--#include counter_front.lua
--#include counter_found.lua

local state, alone = found(#KEYS > 2, ARGV[1])
if not state then return 'lost' end
return {state, alone, redis.call('XRANGE', KEYS[#KEYS], ARGV[2], '+', 'COUNT', ARGV[3])}
