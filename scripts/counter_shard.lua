-- counter_shard.lua: a shard of a sum: open it, add to it, or close it.
--
-- KEYS     hc:{n}:h:<key>
-- ARGV     open, add or close; the epoch; then of open: 1 when the sum has nothing of its shards yet, so that one that is
--          not there was not lost; of add: by how much; of close: when it ends by itself, ms, or 0: never
-- Returns  the shard, "epoch phase value sequence at run"; "moved": it takes nothing in this epoch, and nothing was added
-- Safe to repeat and to arrive late, but add: the epoch says so, of which later ones are greater. A shard that a server
-- brings back from before a restart is not added to any more: it may have lost what the sum has of it. O(1).
--#include counter_number.lua

local what, epoch = ARGV[1], ARGV[2]
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local run = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
local text = redis.call('GET', KEYS[1])
local is, phase, value, sequence, at, of
if text then is, phase, value, sequence, at, of = string.match(text, '^(%S+) (%S+) (%S+) (%S+) (%S+) (%S+)$') end

local function keep(phase, value, sequence, at)
  local text = table.concat({epoch, phase, value, string.format('%.0f', sequence), at or string.format('%.0f', now), run}, ' ')
  redis.call('SET', KEYS[1], text)
  return text
end

local function later(a, b)
  local a1, a2 = string.match(a, '^(%d+)%.(%d+)$')
  local b1, b2 = string.match(b, '^(%d+)%.(%d+)$')
  if a1 ~= b1 then return tonumber(a1) > tonumber(b1) end
  return tonumber(a2) > tonumber(b2)
end

if what == 'add' then
  if is ~= epoch or phase ~= 's' or of ~= run then return 'moved' end
  local after = plus(value, ARGV[3])
  if not after or #after > 17 then return 'moved' end -- the sum has to judge it
  return keep('s', after, sequence + 1)
elseif what == 'open' then
  if is and not later(epoch, is) then return is == epoch and phase == 's' and of == run and text or 'moved' end
  if ARGV[3] ~= '1' then return 'moved' end
  return keep('s', '0', 0)
end
if not (is and later(is, epoch) or is == epoch and phase == 'c') then
  if is ~= epoch then value, sequence, at = '0', 0, '0' end -- it is lost; the sum keeps what it has of it
  text, is = keep('c', value, sequence, at), epoch
end
if is == epoch and ARGV[3] ~= '0' then redis.call('PEXPIRE', KEYS[1], ARGV[3]) end
return text
