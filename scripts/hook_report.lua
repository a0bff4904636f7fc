-- hook_report.lua: replace the reported states of subjects of a webhook, and put events into its
-- outbox.
--
-- KEYS[1]  hc:{w:HOOK}:t  hash: subject -> reported state
-- KEYS[2]  hc:{w:HOOK}:q  list: events, oldest first
-- KEYS[3]  hc:{w:HOOK}:s  string: how many of the oldest are the frozen batch
-- ARGV[1]  maximum number of events in the outbox   ARGV[2]  expiry of the keys, s
-- ARGV[3…] for each subject: the subject, the state that must be the reported one, the new state,
--          and the event, which is empty for none
-- Returns  how many of the oldest events were dropped, and for each subject its reported state
-- Safe to repeat: by then, the reported state is the new one.

local dropped, reported = 0, {}
for i = 3, #ARGV, 4 do
  local subject, was, is, event = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  local last = redis.call('HGET', KEYS[1], subject) or ''
  if last == was and was ~= is then
    last = is
    if is == '' then
      redis.call('HDEL', KEYS[1], subject)
    else
      redis.call('HSET', KEYS[1], subject, is)
    end
    if event ~= '' then
      redis.call('RPUSH', KEYS[2], event)
    end
  end
  reported[#reported + 1] = last
end
while redis.call('LLEN', KEYS[2]) > tonumber(ARGV[1]) do
  local n = tonumber(redis.call('GET', KEYS[3]) or '1') -- a frozen batch is dropped as a whole
  redis.call('LTRIM', KEYS[2], n, -1)
  redis.call('UNLINK', KEYS[3])
  dropped = dropped + n
end
for _, key in ipairs(KEYS) do
  redis.call('EXPIRE', key, ARGV[2])
end
return {dropped, reported}
