-- counter_history.lua: read what a counter gained.
--
-- KEYS     hc:{n}:c, hc:{n}:s, the list of steps of a unique; then its history of the step; in front instead
--          hc:{n}:d, hc:{n}:t and what is not persisted, since the last checkpoint and in it
-- ARGV     its key, the step in seconds, the number of the first and of the last step
-- Returns  its state or ""; its history; of a unique instead, at the end, a list of numbers and registers. In front
--          its state or ""; 1 when PostgreSQL has the history of an earlier life at most; what is not persisted, of the
--          checkpoint first. Or "lost".
-- It writes nothing. O(what is asked for).
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
-- tail is the end of a history, with all steps from the first one. Longer and longer ends are read.
local function tail(key, first)
  local size = 256
  while true do
    local text = redis.call('GETRANGE', key, -size, -1)
    if #text < size then return text end
    text = string.match(text, ' (.*)$') or '' -- what comes before a space may be the end of a number
    if tonumber(string.match(text, '^%d+') or first) < first then return text end
    size = size * 4
  end
end
if #KEYS == 4 then return {state, tail(KEYS[4], tonumber(ARGV[3])), seen} end
if not front(KEYS[2]) then return 'lost' end
local earlier = redis.call('HGET', KEYS[4], ARGV[1]) == 'x' -- what the checkpoint has is of an earlier life
return {state, wasDeleted(KEYS[4], KEYS[5], ARGV[1]) and 1 or 0, earlier and {} or redis.call('HGETALL', KEYS[7]), redis.call('HGETALL', KEYS[6]), seen}
