-- counter_merge.lua: merge a replication batch of another region (counter_log.lua) into a bucket.
--
-- KEYS     hc:{n}:c, hc:{n}:s, hc:{n}:f, hc:{n}:log, hc:{n}:gone, a scratch key; then for each counter its set and
--          registers and, if it was ever deleted, also its ledger, list of time buckets, dimensions and histories
-- ARGV[1]  PUBLISH or SPUBLISH   ARGV[2] the bucket's channel   ARGV[3] the sender   ARGV[4] the region that this must be
-- ARGV[5]  log: a batch of the sender's log ARGV[6], from the position ARGV[7] to ARGV[8]
--          begin: the whole bucket follows; ARGV[6] names this transfer, ARGV[8] is the last position of the sender's log
--          ARGV[7]
--          all: a page of the whole bucket
--          end: the last page of the transfer ARGV[6]; with it, this region has the log ARGV[7] up to ARGV[8]
-- ARGV[9…] for each counter eight values: key, kind, time of the last change, died, emptied, parts and registers as
--          counter_log.lua returns them, and the index of its first key
-- Returns  merged, or unready and the region of this Redis; the position in the sender's log that this region has, 'log
--          place', or the state of a transfer; how many counters were new; how many could not be merged; after begin,
--          older if this region has more of the log than the sender: its server has lost data
-- Safe to lose, to repeat and to reorder: the merge of a part takes the greater sequence, and that of incarnations,
-- deletes and resets the greater number. A position only moves on from where it is. O(counters * their parts).
--#include counter_number.lua
--#include counter_remote.lua
--#include counter_steps.lua
--#include counter_updates.lua

local counters, state, remotes, log, gone, free = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local from, self, mode = ARGV[3], ARGV[4], ARGV[5]
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local s = redis.call('HMGET', state, 'region', 'deleted', 'from:' .. from)
local deleted, place = tonumber(s[2] or 0), s[3] or ''
if s[1] ~= self then return {'unready', s[1] or '', 0, 0} end

-- text returns the record of a counter as hc:{n}:c has it; read parses it.
local function text(rec)
  return table.concat({rec.kind, rec.value, rec.at, string.format('%.0f', rec.incarnation), string.format('%.0f', rec.sequence), rec.entries}, ' ') .. rec.rest
end

local function read(key)
  local found = redis.call('HGET', counters, key)
  if not found then return nil end
  local kind, value, at, incarnation, sequence, entries, rest = string.match(found, '^(%S+) (%S+) (%S+) (%S+) (%S+) (%S+)(.*)$')
  return {kind = kind, value = value, at = at, incarnation = tonumber(incarnation), sequence = tonumber(sequence), entries = entries, rest = rest}
end

-- A batch that continues the log at this region's position is not passed on: every region reads that log itself. Any
-- other batch may be news to others, because this region may have lost data that it had sent to them.
local has, at = string.match(place, '^(%S+) (%d+)$')
local follows = mode == 'log' and has == ARGV[6] and tonumber(at) >= tonumber(ARGV[7])

local updates, news, odd = {}, 0, 0
local function notify(key, rec, all) noteUpdate(updates, key, rec and text(rec), all) end
local function note(key) noteChange(state, log, key) end

-- take merges the parts that the sender has into remote. It returns
--   new     whether anything changed
--   behind  whether the sender lost data of its own, or counts members that this region has lost: it needs an answer
--   top     the greatest incarnation of this region that the sender knows
--   lost    whether the sender knows more of this region's incarnation than rec has, so that this region lost data
--   full    whether a part was dropped, because the counter has PARTS already
local function take(remote, rec, kind, parts, own)
  local new, behind, top, lost, full = false, false, 0, false, false
  eachPart(parts, function(p)
    local name = partName(kind, p.region, p.incarnation)
    local is = remote.by[name]
    if p.region == self then
      top = math.max(top, p.incarnation)
      if rec and p.incarnation == rec.incarnation and (p.sequence > rec.sequence or p.sequence == rec.sequence and compare(p.value, own) > 0) then lost = true end
      if kind ~= 'sum' then
        if not rec or p.incarnation < rec.incarnation then behind = true end
        return
      end
    end
    if not is then
      if #remote.list < PARTS then -- a part of 0, too, so that a late batch with an older value is recognized
        addPart(remote, name, p)
        new = true
      else
        full = true
      end
      return
    end
    local further = p.incarnation == is.incarnation and (p.sequence > is.sequence or p.sequence == is.sequence and compare(p.value, is.value) > 0)
    if p.incarnation > is.incarnation or further then -- after a loss of data one sequence may have had two values
      new = new or p.value ~= is.value or p.incarnation > is.incarnation
      is.incarnation, is.sequence, is.value = p.incarnation, p.sequence, p.value
    elseif p.region == from and (p.incarnation < is.incarnation or p.sequence < is.sequence or p.value ~= is.value) then
      behind = true
    end
    if p.at > is.at then is.at, is.base, new = p.at, p.base, true end
  end)
  return new, behind, top, lost, full
end

-- ownPart returns the value of the part of this region's own incarnation.
local function ownPart(remote, rec) return rec.kind == 'unique' and '0' or minus(rec.value, elsewhere(remote, rec.kind)) end

-- keep returns the replica state with this region's own part alone, and the value of that part.
local function keep(remote, rec)
  local mine = remote.by[partName(rec.kind, self, rec.incarnation)]
  local is = {died = remote.died, emptied = remote.emptied, list = {}, by = {}}
  if mine then addPart(is, partName(rec.kind, self, rec.incarnation), mine) end
  return {remote = is, own = ownPart(remote, rec)}
end

-- markOf returns the mark of a sharded sum, or nil if the sum is not sharded. The mark stays when the sum is deleted: what
-- its shards gain from now on belongs to the next incarnation. Until they have delivered an increment, the record has the
-- sequence 0 and the counter counts as deleted.
local function markOf(rec)
  local epoch, has = string.match(rec.rest, ' %*([^:]+):[osc](.*)$')
  return epoch and ' *' .. epoch .. ':s' .. has
end

-- merge merges one counter of the batch, in this order: a delete, a reset of a set or unique, parts, registers. A
-- delete is written at once; the rest is dropped if its total overflows 64 bits.
local function merge(i)
  local key, kind, at, died, emptied, parts, registers, first = ARGV[i], ARGV[i + 1], ARGV[i + 2], tonumber(ARGV[i + 3]), tonumber(ARGV[i + 4]), ARGV[i + 5], ARGV[i + 6], tonumber(ARGV[i + 7])
  local rec, before = read(key), redis.call('HGET', remotes, key)
  local remote, dropped, orphans = readRemote(before, rec and rec.kind or kind), false, nil
  if not rec and kind == '' and died < now - REMEMBERED then return end -- a delete that this region has forgotten
  if rec and rec.kind == 'exact' then
    odd = odd + 1
    return
  end
  if died < remote.died then return note(key) end -- the sender does not know of the delete: send it
  if died > remote.died and died > deleted then -- new incarnations of any counter must be greater than a delete
    deleted = died
    redis.call('HSET', state, 'deleted', string.format('%.0f', deleted))
  end
  local kept, again = nil, false -- kept: this region's own part, which survives; again: other regions need this counter
  if died > remote.died and rec and rec.incarnation > died and not remote.heard then -- it began after the delete, unaware of it
    kept = keep(remote, rec)
    remote, again = kept.remote, true
    remote.died, remote.emptied = died, 0
  elseif died > remote.died then
    if rec then
      if rec.kind == 'sum' and (kind == '' or kind == 'sum') then orphans = markOf(rec) end
      for k = first, first + 2 do redis.call('UNLINK', KEYS[k]) end
      for k = first + 4, first + 11 do redis.call('UNLINK', KEYS[k]) end
      dropSteps(KEYS[first + 3])
      redis.call('HDEL', counters, key)
      if kind == '' then notify(key, nil, true) end
    end
    dropped = rec ~= nil
    rec, remote = nil, {died = died, emptied = emptied, heard = orphans ~= nil, list = {}, by = {}}
    before = writeRemote(remote)
    redis.call('HSET', remotes, key, before)
    bury(counters, remotes, gone, key, died, now)
    if not follows then note(key) end
    news = news + 1
  end
  if kind == '' and orphans then
    redis.call('HSET', counters, key, text({kind = 'sum', value = '0', at = '0', incarnation = math.max(now, deleted + 1), sequence = 0, entries = '0', rest = orphans}))
  end
  if kind == '' and not kept then return end
  if kind ~= '' and rec and rec.kind ~= kind then
    odd = odd + 1
    return
  end
  if kind == '' then kind, emptied = rec.kind, remote.emptied end -- deleted there, but this region's part survives
  local own = '0'
  if kept then own = kept.own elseif rec then own = ownPart(remote, rec) end
  if not own then -- an overflow from before scripts refused it
    odd = odd + 1
    return
  end
  local empties = dropped
  if kind ~= 'sum' and emptied < remote.emptied then return note(key) end -- the sender does not know of the reset: send it
  if kind ~= 'sum' and emptied > remote.emptied then
    again = true
    local heard = remote.heard
    remote = {died = died, emptied = emptied, heard = heard, list = {}, by = {}}
    if not rec or rec.incarnation <= emptied or heard then
      redis.call('UNLINK', KEYS[first], KEYS[first + 1])
      own, empties = '0', empties or rec ~= nil
    end
  end
  -- For take, this region's own part is one of the parts. After it, either it stays there as that of a former
  -- incarnation, or it returns to the record.
  if rec and kind == 'sum' then
    local name = partName(kind, self, rec.incarnation)
    if not remote.by[name] then addPart(remote, name, {region = self, incarnation = rec.incarnation, at = 0, base = '0'}) end
    remote.by[name].sequence, remote.by[name].value = rec.sequence, own
  end
  local new, behind, top, lost, full = take(remote, rec, kind, parts, own)
  if full then odd = odd + 1 end
  local is = rec
  if not rec then
    remote.heard = true
    is = {kind = kind, value = '0', at = '0', incarnation = math.max(now, deleted + 1, top + 1), sequence = 0, entries = '0', rest = orphans or ''}
  elseif top > rec.incarnation or lost then -- this region lost data: begin a new incarnation
    is.incarnation, is.sequence, again, remote.heard = math.max(now, top + 1, rec.incarnation + 1), 0, true, true
    is.rest = string.gsub(is.rest, '( %*[^:]+):.*$', '%1:f') -- its shards delivered to the former incarnation
  elseif kind == 'sum' then
    local mine = remote.by[partName(kind, self, rec.incarnation)]
    mine.sequence, mine.value = 0, '0'
  end
  local value
  if kind == 'unique' then
    local registersKey = KEYS[first + 1]
    local was = redis.call('GET', registersKey) or ''
    if registers ~= '' then
      redis.call('SET', free, registers)
      local merged = redis.pcall('PFMERGE', registersKey, free)
      redis.call('UNLINK', free)
      if merged.err then
        odd = odd + 1
        return
      end
      if string.sub(redis.call('GET', registersKey), 17) ~= string.sub(was, 17) then new, empties = true, true end -- without the header, which caches the estimate
    end
    value = string.format('%.0f', redis.call('PFCOUNT', registersKey))
  else
    if kind == 'sum' and is.sequence == 0 then own = '0' end -- a new incarnation: the own part is now one of the others
    value = plus(own, elsewhere(remote, kind))
  end
  if not value or #value > 18 and string.find(is.rest, ' *', 1, true) and string.sub(is.rest, -2) ~= ':f' then
    odd = odd + 1
    return
  end
  local field = writeRemote(remote)
  if field and field ~= before then redis.call('HSET', remotes, key, field) end
  if not rec or is.sequence == 0 or empties or value ~= is.value then
    is.value, is.sequence = value, is.sequence + 1
    is.at = string.format('%.0f', math.max(tonumber(is.at), tonumber(at)))
    redis.call('HSET', counters, key, text(is))
    notify(key, is, empties and kind == 'members')
  end
  if new then news = news + 1 end
  if again or behind or new and not follows then note(key) end
end

for i = 9, #ARGV, 8 do merge(i) end

local run = mode ~= 'log' and string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
local was, older = place, nil
if mode == 'begin' then
  if at and tonumber(at) > tonumber(ARGV[8]) then older = 'older' end
  place = 'all ' .. ARGV[6] .. ' ' .. run
elseif mode == 'end' then
  if place == 'all ' .. ARGV[6] .. ' ' .. run then place = ARGV[7] .. ' ' .. ARGV[8] end
elseif follows and tonumber(at) < tonumber(ARGV[8]) then
  place = has .. ' ' .. ARGV[8]
end
if place ~= was then redis.call('HSET', state, 'from:' .. from, place) end
if #updates > 0 then
  publishUpdates(ARGV[1], ARGV[2], state, updates)
  redis.call('HINCRBY', state, 'shared', 1) -- see alone in counter_log.lua
end
return {'merged', place, news, odd, older}
