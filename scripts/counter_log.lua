-- counter_log.lua: read counters of a bucket for a replication batch to another region.
--
-- KEYS     hc:{n}:c, hc:{n}:s, hc:{n}:f, hc:{n}:log
-- ARGV[1]  this region   ARGV[2] the log that the peer has, or ''; 'keys': read the counters in ARGV[5…]
-- ARGV[3]  the position up to which the peer has that log   ARGV[4] maximum number of counters
-- Returns  the region of this Redis, '' and 'other' if it is not ARGV[1]. Otherwise the number of the log; the position that
--          this batch reaches (with keys: how many of them it has); 'all' (the log does not reach back to the peer's
--          position, so the whole bucket has to be sent), 'more' or 'end'; then for each counter seven values: key,
--          kind or '' if it was deleted, time of its last change, died, emptied, its parts, and registers of a unique
-- A log ends with the run of its server, because a restarted server may have lost positions that peers have. The script
-- begins a log when there is none, and writes nothing else; it is safe to repeat. O(counters).
--#include counter_number.lua
--#include counter_remote.lua

local REGISTERS = 262144 -- bytes of registers after which a batch ends
local region, has, cursor, limit = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local run = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
local s = redis.call('HMGET', KEYS[2], 'log', 'logrun', 'places', 'trimmed', 'region', 'told', 'shared', 'alone')
local log, places, trimmed = s[1], tonumber(s[3] or 0), tonumber(s[4] or 0)
if s[5] and s[5] ~= region then return {s[5], '', 'other'} end
if not s[5] then redis.call('HSET', KEYS[2], 'region', region) end
-- alone is the number of publications by processes without regions, which write no log: when it grows, the log lacks
-- changes.
local alone = string.format('%.0f', tonumber(s[6] or 0) - tonumber(s[7] or 0))
if not log or s[2] ~= run or s[8] ~= alone then
  local clock = redis.call('TIME')
  log, trimmed = clock[1] .. '.' .. clock[2], places
  redis.call('HSET', KEYS[2], 'log', log, 'logrun', run, 'places', places, 'trimmed', trimmed, 'alone', alone)
  redis.call('UNLINK', KEYS[4])
end

local out, bytes = {log, '', 'end'}, 0
local tag = string.match(KEYS[1], '^(hc:{n%d+}:)')
-- add adds a counter to the batch. This region's own part is computed from the record.
local function add(key)
  local text = redis.call('HGET', KEYS[1], key)
  local kind, value, at, incarnation, sequence = string.match(text or '', '^(%S+) (%S+) (%S+) (%S+) (%S+)')
  if kind == 'exact' then return end
  if sequence == '0' then kind = nil end -- deleted elsewhere, and not changed since: see closing in counter_merge.lua
  local remote = readRemote(redis.call('HGET', KEYS[3], key), kind)
  if not kind and remote.died == 0 then return end
  local parts, registers = {}, ''
  if kind then
    local mine = {region = region, incarnation = tonumber(incarnation), sequence = tonumber(sequence), value = '0', at = 0, base = '0'}
    local own = remote.by[partName(kind, region, mine.incarnation)]
    if own then mine.at, mine.base = own.at, own.base end
    if kind ~= 'unique' then mine.value = minus(value, elsewhere(remote, kind)) end
    if not mine.value then return end -- an overflow from before scripts refused it
    parts[1] = partText(mine)
    for _, p in ipairs(remote.list) do
      if p ~= own then parts[#parts + 1] = partText(p) end
    end
    if kind == 'unique' then registers = redis.call('GET', tag .. 'r:' .. key) or '' end
  end
  bytes = bytes + #registers
  for _, is in ipairs({key, kind or '', at or '0', string.format('%.0f', remote.died), string.format('%.0f', remote.emptied), table.concat(parts), registers}) do
    out[#out + 1] = is
  end
end

if has == 'keys' then
  for i = 5, #ARGV do
    add(ARGV[i])
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
    add(found[i])
    if bytes > REGISTERS and i + 1 < #found then
      to, out[3] = found[i + 1], 'more'
      break
    end
  end
  out[2] = to
end
return out
