-- hook_told.lua: return a part of what was told of the subjects of a webhook.
--
-- KEYS[1]  hc:{w:HOOK}:t  hash: subject -> what was told last
-- ARGV[1]  cursor: 0, or what the last call returned
-- Returns  the next cursor, 0 after the last part; subjects, and what was told of each
-- It reads. A subject that is there all the while is returned at least once.

return redis.call('HSCAN', KEYS[1], ARGV[1], 'COUNT', 1000)
