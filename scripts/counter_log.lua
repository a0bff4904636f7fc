-- counter_log.lua: what a region has to tell others of counters of a bucket.
--
-- KEYS     hc:{n}:c, hc:{n}:s, hc:{n}:f, hc:{n}:log
-- ARGV[1]  this region   ARGV[2] the log that the other has, or ''; 'keys': tell of those in ARGV[5…]
-- ARGV[3]  the place up to which it has that log   ARGV[4] how many counters at most
-- Returns  the name of the region, '' and other when this Redis is another region's than ARGV[1]; or the number of the log, the place up to which this tells it (with keys how many of them), and all (that log does not reach back: all
--          counters have to be told), more or end; then for each counter seven: key, kind or '' when it was
--          deleted, when it changed, died, emptied, its parts, and registers of a unique.
-- A log ends with the run of its server: a server that comes back may have forgotten places that others have. It
-- begins a log when there is none, which may happen twice, and writes nothing else. O(counters).
--#include counter_number.lua
--#include counter_far.lua

local REGISTERS = 262144 -- bytes of them in one answer, about
local region, has, cursor, limit = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local run = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
local s = redis.call('HMGET', KEYS[2], 'log', 'logrun', 'places', 'trimmed', 'region', 'told', 'shared', 'alone')
local log, places, trimmed = s[1], tonumber(s[3] or 0), tonumber(s[4] or 0)
if s[5] and s[5] ~= region then return {s[5], '', 'other'} end
if not s[5] then redis.call('HSET', KEYS[2], 'region', region) end
-- Publications of processes without regions, whose changes are in no log.
local alone = string.format('%.0f', tonumber(s[6] or 0) - tonumber(s[7] or 0))
if not log or s[2] ~= run or s[8] ~= alone then
  local clock = redis.call('TIME')
  log, trimmed = clock[1] .. '.' .. clock[2], places
  redis.call('HSET', KEYS[2], 'log', log, 'logrun', run, 'places', places, 'trimmed', trimmed, 'alone', alone)
  redis.call('UNLINK', KEYS[4])
end

local out, bytes = {log, '', 'end'}, 0
local tag = string.match(KEYS[1], '^(hc:{n%d+}:)')
local function tell(key)
  local text = redis.call('HGET', KEYS[1], key)
  local kind, value, at, life, sequence = string.match(text or '', '^(%S+) (%S+) (%S+) (%S+) (%S+)')
  if kind == 'exact' then return end
  if sequence == '0' then kind = nil end -- nobody has touched it since it was deleted
  local far = readFar(redis.call('HGET', KEYS[3], key), kind)
  if not kind and far.died == 0 then return end
  local parts, registers = {}, ''
  if kind then
    local mine = {region = region, life = tonumber(life), sequence = tonumber(sequence), value = '0', at = 0, base = '0'}
    local own = far.by[partName(kind, region, mine.life)]
    if own then mine.at, mine.base = own.at, own.base end
    if kind ~= 'unique' then mine.value = minus(value, elsewhere(far, kind)) end
    if not mine.value then return end -- it left 64 bits before that was refused
    parts[1] = partText(mine)
    for _, p in ipairs(far.list) do
      if p ~= own then parts[#parts + 1] = partText(p) end
    end
    if kind == 'unique' then registers = redis.call('GET', tag .. 'r:' .. key) or '' end
  end
  bytes = bytes + #registers
  for _, is in ipairs({key, kind or '', at or '0', string.format('%.0f', far.died), string.format('%.0f', far.emptied), table.concat(parts), registers}) do
    out[#out + 1] = is
  end
end

if has == 'keys' then
  for i = 5, #ARGV do
    tell(ARGV[i])
    out[2] = string.format('%.0f', i - 4)
    if bytes > REGISTERS then break end
  end
elseif has ~= log or cursor < trimmed or cursor > places then
  out[2], out[3] = string.format('%.0f', places), 'all'
else
  local found = redis.call('ZRANGEBYSCORE', KEYS[4], '(' .. ARGV[3], '+inf', 'WITHSCORES', 'LIMIT', 0, limit)
  local to = #found < 2 * limit and string.format('%.0f', places) or found[#found]
  if #found == 2 * limit then out[3] = 'more' end
  for i = 1, #found, 2 do
    tell(found[i])
    if bytes > REGISTERS and i + 1 < #found then
      to, out[3] = found[i + 1], 'more'
      break
    end
  end
  out[2] = to
end
return out
