-- hook_reported.lua: return a part of the reported states of a webhook.
--
-- KEYS[1]  hc:{w:HOOK}:t  hash: subject -> reported state
-- ARGV[1]  cursor: 0, or the cursor that the last call returned
-- Returns  the next cursor, 0 after the last part; subjects, each followed by its state
-- Reads only. A subject that exists during all calls is returned at least once.

return redis.call('HSCAN', KEYS[1], ARGV[1], 'COUNT', 1000)
