-- counter_history.lua: read time buckets of a counter's history.
--
-- KEYS     hc:{n}:c, hc:{n}:s, the list of time buckets of a unique; then the history of that step. In front instead
--          hc:{n}:d, hc:{n}:t, and the completed time buckets since the checkpoint and those of the checkpoint
-- ARGV     the counter's key, the step in seconds, the first and the last index
-- Returns  its state or ""; its history; a list of indexes and registers of a unique. In front its state or ""; 1 if the
--          history in PostgreSQL, if any, is of an earlier incarnation; the time buckets of the checkpoint; those since
--          then; the list of a unique. Or "lost"
-- It writes nothing. O(time buckets read).
--#include counter_front.lua
--#include counter_steps.lua

local state = redis.call('HGET', KEYS[1], ARGV[1]) or ''
local seen = {}
if string.sub(state, 1, 7) == 'unique ' then
  for _, name in ipairs(redis.call('ZRANGE', KEYS[3], 0, -1)) do
    local step, number = string.match(name, '^(%d+):(%d+)$')
    if step == ARGV[2] and tonumber(number) >= tonumber(ARGV[3]) and tonumber(number) <= tonumber(ARGV[4]) then
      local registers = redis.call('GET', stepKey(KEYS[3], name))
      if registers then
        seen[#seen + 1] = number
        seen[#seen + 1] = registers
      end
    end
  end
end
-- tail returns the end of a history that contains all time buckets from first on. It reads ever longer ends until one
-- begins before first.
local function tail(key, first)
  local size = 256
  while true do
    local text = redis.call('GETRANGE', key, -size, -1)
    if #text < size then return text end
    text = string.match(text, ' (.*)$') or '' -- the text before the first space may be a cut entry
    if tonumber(string.match(text, '^%d+') or first) < first then return text end
    size = size * 4
  end
end
if #KEYS == 4 then return {state, tail(KEYS[4], tonumber(ARGV[3])), seen} end
if not front(KEYS[2]) then return 'lost' end
local earlier = redis.call('HGET', KEYS[4], ARGV[1]) == 'x' -- then the checkpoint has an earlier incarnation
return {state, wasDeleted(KEYS[4], KEYS[5], ARGV[1]) and 1 or 0, earlier and {} or redis.call('HGETALL', KEYS[7]), redis.call('HGETALL', KEYS[6]), seen}
