-- counter_load.lua: make counters resident in a bucket, with the state that PostgreSQL has, or as not existing.
--
-- KEYS     hc:{n}:c, :s, :d, :t, :j, :a, :h; then sets or registers, and their staged contents
-- ARGV[1]  the bucket's ticket from before PostgreSQL was read: its generation, and how many counters were evicted
-- ARGV[2]  JSON: [{"key":…,"state":state or "-","set":index of a key,"staged":index of a key}]
-- Returns  "ok": every counter is resident now, loaded by this or another call; "moved": counters were evicted since, so
--          the rows may be older than what the bucket had meanwhile; "lost"
-- Safe to repeat and to arrive late, because it checks the ticket. O(counters).
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
