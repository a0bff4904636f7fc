-- counter_load.lua: put counters that PostgreSQL has, or that do not exist, into one bucket.
--
-- KEYS     the six of the bucket, and hc:{n}:h; then sets or registers and what was staged for them, named by their number
-- ARGV[1]  the bucket's ticket, from before PostgreSQL was read
-- ARGV[2]  JSON: [{"key":…,"state":state or "-","set":9,"staged":10}]
-- Returns  "ok": each has a field now, ours or somebody's; "moved": counters have left the bucket since;
--          "lost"
-- Safe to repeat and to arrive late: the ticket says so. O(counters).
--#include counter_front.lua

local f = front(KEYS[2])
if not f then return 'lost' end
if f.ticket ~= ARGV[1] then return 'moved' end
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local answer = 'ok'
for _, e in ipairs(cjson.decode(ARGV[2])) do
  local is = redis.call('HGET', KEYS[1], e.key)
  if not is then
    local whole = true
    if e.staged then
      whole = redis.call('EXISTS', KEYS[e.staged]) == 1
      if whole then
        redis.call('RENAME', KEYS[e.staged], KEYS[e.set])
        redis.call('PERSIST', KEYS[e.set])
      end
    end
    if whole then
      if string.find(e.state, ' *', 1, true) then redis.call('HSET', KEYS[7], e.key, '') end
      redis.call('HSET', KEYS[1], e.key, e.state)
      redis.call('ZADD', KEYS[6], e.state == '-' and 1 or now, e.key)
    else
      answer = 'moved'
    end
  elseif e.staged then
    redis.call('UNLINK', KEYS[e.staged])
  end
end
return answer
