-- counter_found.lua: whether Redis has all that there is of a counter. Other scripts include this file after
-- counter_front.lua; it does not run by itself.

-- found returns the state of a counter or "", and 1 if PostgreSQL has nothing of it: there is none, the counter does
-- not exist, or the rows are of an earlier incarnation, which was deleted; otherwise 0. In front, KEYS begins with
-- hc:{n}:c, :s, :d and :t, otherwise with hc:{n}:c; and found returns nil if the bucket may have lost data.
local function found(inFront, key)
  local state = redis.call('HGET', KEYS[1], key) or ''
  if not inFront then return state, 1 end
  if not front(KEYS[2]) then return nil end
  local taken = redis.call('HGET', KEYS[4], key) or ''
  local deleted = redis.call('HGET', KEYS[3], key) == 'x' or string.sub(taken, 1, 1) == 'x'
  return state, (state == '-' or deleted) and 1 or 0
end
