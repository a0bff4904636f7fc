-- counter_settle.lua: add what PostgreSQL has of a loose counter to what changed without it.
--
-- KEYS     hc:{n}:c, :s, :k, :d; its set, its registers; what became of its members, and what it gained in steps that are
--          over, each of epochs of even and of odd number; what was staged of its set or registers; its list of steps;
--          what it counted, by epoch
-- ARGV     PUBLISH or SPUBLISH; the channel; the bucket's ticket, from before PostgreSQL was read; its key; its row as a
--          state, "pg" or "-"; 1 when something was staged
-- Returns  "ok": it is loose no more; what was in it, when that does not fit its row and is dropped; "moved": look again;
--          "lost"
-- Safe to repeat and to arrive late: a counter is settled once. O(its changes).
--#include counter_number.lua
--#include counter_set.lua
--#include counter_front.lua
--#include counter_steps.lua

local counters, bucket, locks, dirty, members, registers, staged = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[11]
local command, channel, ticket, key, row, isStaged = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6] == '1'
local f = front(bucket)
if not f then return 'lost' end
local was = redis.call('HGET', counters, key)
if not was or string.sub(was, 1, 1) ~= '?' then
  redis.call('UNLINK', staged)
  return 'ok'
end
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local frozen = tonumber(redis.call('HGET', bucket, 'until') or 0) > now
if f.ticket ~= ticket or frozen or redis.call('HEXISTS', locks, key) == 1 or isStaged and redis.call('EXISTS', staged) == 0 then return 'moved' end
local moved, gained = KEYS[6 + f.parity], KEYS[8 + f.parity] -- no epoch ends while a counter is loose

local function parse(text)
  local kind, value, at, incarnation, sequence, entries, slots = string.match(text, '^(%S+) (%S+) (%S+) (%S+) (%S+) (%S+)(.*)$')
  if not kind then return nil end
  local mark = string.find(slots, ' *', 1, true) or #slots + 1 -- of a hot sum
  return {kind = kind, value = value, at = tonumber(at), incarnation = tonumber(incarnation), sequence = tonumber(sequence), entries = entries,
    slots = string.sub(slots, 1, mark - 1), mark = string.sub(slots, mark)}
end

local function sum(a, b) return plus(a, b) or string.sub(a, 1, 1) == '-' and LEAST or MOST end

-- take puts what was staged in its place.
local function take(to)
  if isStaged then
    redis.call('RENAME', staged, to)
    redis.call('PERSIST', to)
  else
    redis.call('UNLINK', to)
  end
end

-- slots are those of both. A step of the row that is over for what was added without it goes to the history.
local function slots(base, added)
  local own, kept, list = {}, {}, {}
  for step, number, value in string.gmatch(added, ' (%d+):(%d+):(%S+)') do
    own[step] = {tonumber(number), value}
    kept[step] = string.match(redis.call('HGET', gained, step .. ':0') or '', '(%S+)$')
    redis.call('HDEL', gained, step .. ':0')
  end
  for step, number, value in string.gmatch(base, ' (%d+):(%d+):(%S+)') do
    local o = own[step]
    if not o then
      own[step] = {tonumber(number), value}
    elseif o[1] <= tonumber(number) then
      own[step] = {tonumber(number), sum(value, o[2])}
    else
      local field = step .. ':' .. number
      local before = string.match(redis.call('HGET', gained, field) or '0', '^%S+')
      redis.call('HSET', gained, field, sum(value, before) .. ' ' .. kept[step])
    end
  end
  for step, o in pairs(own) do
    if #list < 4 then list[#list + 1] = ' ' .. step .. ':' .. string.format('%.0f', o[1]) .. ':' .. o[2] end
  end
  return table.concat(list)
end


local base, added, answer = parse(row), parse(string.sub(was, 2)), 'ok'
local is, keeps = row, false -- keeps: something of it is not persisted
if not added then
  local set = base and base.kind == 'unique' and registers or members
  if isStaged then take(set) end
elseif row == 'pg' or base and base.kind ~= added.kind then
  answer = added.kind .. ' ' .. added.value
  redis.call('UNLINK', members, registers, moved, gained, KEYS[12 + f.parity])
  dropSteps(KEYS[12])
  if base then
    if isStaged then take(base.kind == 'unique' and registers or members) end
    base.at, base.incarnation, base.sequence, keeps = now, added.incarnation, added.sequence + 1, true
  end
else
  keeps = true
  local value = added.value
  if base then
    if added.kind == 'sum' then
      value = sum(base.value, value)
    elseif added.kind == 'unique' and isStaged then
      redis.call('PFMERGE', registers, staged)
      redis.call('UNLINK', staged)
      value = string.format('%.0f', redis.call('PFCOUNT', registers))
    elseif added.kind == 'members' and isStaged then
      local set, size, list = openSet(staged), tonumber(base.value), redis.call('HGETALL', moved)
      for i = 1, #list, 2 do
        local joined, hash = string.sub(list[i + 1], 1, 1) == '1', string.sub(list[i + 1], 2)
        if joined and join(set, hash, size) then
          size = size + 1
        elseif not joined and leave(set, hash) then
          size = size - 1
        end
      end
      keepSet(set)
      value = string.format('%.0f', size)
      if size > 0 then take(members) else redis.call('UNLINK', members, staged) end
    end
    if base.incarnation > added.incarnation or base.incarnation == added.incarnation and base.sequence > added.sequence then
      added.incarnation, added.sequence = base.incarnation, base.sequence
    end
    added.at, added.entries, added.mark = math.max(base.at, added.at), base.entries, base.mark
  end
  added.value, added.sequence, added.slots = value, added.sequence + 1, slots(base and base.slots or '', added.slots)
  base = added
end
if base then
  is = table.concat({base.kind, base.value, string.format('%.0f', base.at), string.format('%.0f', base.incarnation), string.format('%.0f', base.sequence), base.entries}, ' ') .. base.slots .. base.mark
end
redis.call('HSET', counters, key, is)
redis.call('HINCRBY', bucket, 'loose', -1)
if keeps then redis.call('HSET', dirty, key, '') else redis.call('HDEL', dirty, key) end
local told = {key = key, state = base and is or '', all = true}
redis.call(command, channel, string.format('%.0f ', redis.call('HINCRBY', bucket, 'told', 1)) .. cjson.encode({told}))
return answer
