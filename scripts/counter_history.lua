-- counter_history.lua: read time buckets of a counter's history.
--
-- KEYS     hc:{n}:c; in front also hc:{n}:s, :d and :t; then the list of time buckets of a unique; then the history of
--          that step, or in front the completed time buckets since the checkpoint and those of the checkpoint
-- ARGV     the counter's key, the step in seconds, the first and the last index
-- Returns  its state or ""; 1 if PostgreSQL has no other time buckets; a list of indexes and registers of a unique; its
--          history, and two empty lists; in front instead "", the time buckets of the checkpoint, and those since
--          then. In front perhaps "lost"
-- It writes nothing. O(time buckets read).
--#include counter_front.lua
--#include counter_found.lua
--#include counter_steps.lua

local inFront = #KEYS > 3
local state, alone = found(inFront, ARGV[1])
if not state then return 'lost' end
local seen, steps = {}, KEYS[inFront and 5 or 2]
if string.sub(state, 1, 7) == 'unique ' then
  for _, name in ipairs(redis.call('ZRANGE', steps, 0, -1)) do
    local step, number = string.match(name, '^(%d+):(%d+)$')
    if step == ARGV[2] and tonumber(number) >= tonumber(ARGV[3]) and tonumber(number) <= tonumber(ARGV[4]) then
      local registers = redis.call('GET', stepKey(steps, name))
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
if not inFront then return {state, alone, seen, tail(KEYS[3], tonumber(ARGV[3])), {}, {}} end
local earlier = redis.call('HGET', KEYS[3], ARGV[1]) == 'x' -- then the checkpoint has an earlier incarnation
return {state, alone, seen, '', earlier and {} or redis.call('HGETALL', KEYS[7]), redis.call('HGETALL', KEYS[6])}
