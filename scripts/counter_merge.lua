-- counter_merge.lua: take what another region tells of counters of a bucket.
--
-- KEYS     hc:{n}:c, hc:{n}:s, hc:{n}:f, hc:{n}:log, hc:{n}:gone, a key that is free; then of each counter its
--          set and registers, and when it was ever deleted also its ledger, list of steps, dimensions and histories
-- ARGV[1]  PUBLISH or SPUBLISH   ARGV[2] the bucket's channel   ARGV[3] who tells   ARGV[4] which region this is to be
-- ARGV[5]  log: the teller's log ARGV[6] from the place ARGV[7] to ARGV[8]
--          begin: all is going to be told; ARGV[6] is a word for that, ARGV[8] the last place of its log ARGV[7]
--          all: some of all
--          end: with what is here all was told since begin with that word; its log ARGV[7] is told up to ARGV[8]
-- ARGV[9…] for each counter eight: key, kind, when it changed, died, emptied, parts and registers as counter_log.lua has
--          them, and the number of its first key
-- Returns  merged, busy (the bucket is held still), or unready and which region this is; how far
--          this region has the teller's log, 'log place', or another text; how many counters
--          were news; how many could not be taken; of begin, older when
--          the teller's log was further on: its server has come back without all of its memory
-- Safe to repeat, to lose and to come in any order: of each part the greater sequence holds, of lives and of what
-- ends them the greater number. A place only moves on from where it is. O(counters * their parts).
--#include counter_number.lua
--#include counter_far.lua
--#include counter_steps.lua
--#include counter_updates.lua

local counters, state, fars, log, gone, free = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local from, self, mode = ARGV[3], ARGV[4], ARGV[5]
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local s = redis.call('HMGET', state, 'region', 'until', 'deleted', 'from:' .. from)
local deleted, place = tonumber(s[3] or 0), s[4] or ''
if s[1] ~= self then return {'unready', s[1] or '', 0, 0} end
if s[2] and now < tonumber(s[2]) then return {'busy', place, 0, 0} end

local function text(rec)
  return table.concat({rec.kind, rec.value, rec.at, string.format('%.0f', rec.life), string.format('%.0f', rec.sequence), rec.entries}, ' ') .. rec.rest
end

local function read(key)
  local found = redis.call('HGET', counters, key)
  if not found then return nil end
  local kind, value, at, life, sequence, entries, rest = string.match(found, '^(%S+) (%S+) (%S+) (%S+) (%S+) (%S+)(.*)$')
  return {kind = kind, value = value, at = at, life = tonumber(life), sequence = tonumber(sequence), entries = entries, rest = rest}
end

-- What follows in a log is known to all who hear that log, so it is not passed on. When this region has not the place before
-- it, because its memory was lost, it may be news to others, as what is told of all is.
local has, at = string.match(place, '^(%S+) (%d+)$')
local follows = mode == 'log' and has == ARGV[6] and tonumber(at) >= tonumber(ARGV[7])

local updates, news, odd = {}, 0, 0
local function tell(key, rec, all) noteUpdate(updates, key, rec and text(rec), all) end
local function note(key) noteChange(state, log, key) end

-- take merges the parts of a line into those that are known, and says what was new, whether the teller has forgotten
-- something of its own or counts a set that this region has lost, the newest life of this region that is named, whether
-- that of rec was once further on, and whether a part found no room.
local function take(far, rec, kind, parts, own)
  local new, behind, top, lost, full = false, false, 0, false, false
  eachPart(parts, function(p)
    local name = partName(kind, p.region, p.life)
    local is = far.by[name]
    if p.region == self then
      top = math.max(top, p.life)
      if rec and p.life == rec.life and (p.sequence > rec.sequence or p.sequence == rec.sequence and compare(p.value, own) > 0) then lost = true end
      if kind ~= 'sum' then
        if not rec or p.life < rec.life then behind = true end
        return
      end
    end
    if not is then
      if #far.list < PARTS then -- also one of 0: a late telling of it is to be known
        addPart(far, name, p)
        new = true
      else
        full = true
      end
      return
    end
    local further = p.life == is.life and (p.sequence > is.sequence or p.sequence == is.sequence and compare(p.value, is.value) > 0)
    if p.life > is.life or further then -- one sequence has two values when an older memory has gone on
      new = new or p.value ~= is.value or p.life > is.life
      is.life, is.sequence, is.value = p.life, p.sequence, p.value
    elseif p.region == from and (p.life < is.life or p.sequence < is.sequence or p.value ~= is.value) then
      behind = true
    end
    if p.at > is.at then is.at, is.base, new = p.at, p.base, true end
  end)
  return new, behind, top, lost, full
end

-- ownPart is what this life of this region gave. keep is that without what is known of others.
local function ownPart(far, rec) return rec.kind == 'unique' and '0' or minus(rec.value, elsewhere(far, rec.kind)) end

local function keep(far, rec)
  local mine = far.by[partName(rec.kind, self, rec.life)]
  local is = {died = far.died, emptied = far.emptied, list = {}, by = {}}
  if mine then addPart(is, partName(rec.kind, self, rec.life), mine) end
  return {far = is, own = ownPart(far, rec)}
end

-- markOf is the mark of a sharded sum, or nil when it is whole. It stays when the sum is deleted: what its 16 shards
-- take from now on is the next life's. Until they have given something, its record has the sequence 0: nobody has touched it.
local function markOf(rec)
  local epoch, has = string.match(rec.rest, ' %*([^:]+):[osc](.*)$')
  return epoch and ' *' .. epoch .. ':s' .. has
end

-- merge takes one line. Nothing of it is written when its total would leave 64 bits.
local function merge(i)
  local key, kind, at, died, emptied, parts, registers, first = ARGV[i], ARGV[i + 1], ARGV[i + 2], tonumber(ARGV[i + 3]), tonumber(ARGV[i + 4]), ARGV[i + 5], ARGV[i + 6], tonumber(ARGV[i + 7])
  local rec, before = read(key), redis.call('HGET', fars, key)
  local far, dropped, orphans = readFar(before, rec and rec.kind or kind), false, nil
  if not rec and kind == '' and died < now - REMEMBERED then return end -- that is forgotten
  if rec and rec.kind == 'exact' then
    odd = odd + 1
    return
  end
  if died < far.died then return note(key) end -- the teller does not know that it was deleted
  if died > far.died and died > deleted then -- lives begin after it
    deleted = died
    redis.call('HSET', state, 'deleted', string.format('%.0f', deleted))
  end
  local kept, again = nil, false -- kept: what this life has itself
  if died > far.died and rec and rec.life > died and not far.heard then -- it began later, without knowing of that
    kept = keep(far, rec)
    far, again = kept.far, true
    far.died, far.emptied = died, 0
  elseif died > far.died then
    if rec then
      if rec.kind == 'sum' and (kind == '' or kind == 'sum') then orphans = markOf(rec) end
      for k = first, first + 2 do redis.call('UNLINK', KEYS[k]) end
      for k = first + 4, first + 11 do redis.call('UNLINK', KEYS[k]) end
      dropSteps(KEYS[first + 3])
      redis.call('HDEL', counters, key)
      if kind == '' then tell(key, nil, true) end
    end
    dropped = rec ~= nil
    rec, far = nil, {died = died, emptied = emptied, heard = orphans ~= nil, list = {}, by = {}}
    before = writeFar(far)
    redis.call('HSET', fars, key, before)
    bury(counters, fars, gone, key, died, now)
    if not follows then note(key) end
    news = news + 1
  end
  if kind == '' and orphans then
    redis.call('HSET', counters, key, text({kind = 'sum', value = '0', at = '0', life = math.max(now, deleted + 1), sequence = 0, entries = '0', rest = orphans}))
  end
  if kind == '' and not kept then return end
  if kind ~= '' and rec and rec.kind ~= kind then
    odd = odd + 1
    return
  end
  if kind == '' then kind, emptied = rec.kind, far.emptied end -- nothing is known of it there
  local own = '0'
  if kept then own = kept.own elseif rec then own = ownPart(far, rec) end
  if not own then -- it left 64 bits before that was refused
    odd = odd + 1
    return
  end
  local empties = dropped
  if kind ~= 'sum' and emptied < far.emptied then return note(key) end -- nor that it was reset
  if kind ~= 'sum' and emptied > far.emptied then
    again = true
    local heard = far.heard
    far = {died = died, emptied = emptied, heard = heard, list = {}, by = {}}
    if not rec or rec.life <= emptied or heard then
      redis.call('UNLINK', KEYS[first], KEYS[first + 1])
      own, empties = '0', empties or rec ~= nil
    end
  end
  if rec and kind == 'sum' then -- this life's own part stands among the others for a while
    local name = partName(kind, self, rec.life)
    if not far.by[name] then addPart(far, name, {region = self, life = rec.life, at = 0, base = '0'}) end
    far.by[name].sequence, far.by[name].value = rec.sequence, own
  end
  local new, behind, top, lost, full = take(far, rec, kind, parts, own)
  if full then odd = odd + 1 end
  local is = rec
  if not rec then
    far.heard = true
    is = {kind = kind, value = '0', at = '0', life = math.max(now, deleted + 1, top + 1), sequence = 0, entries = '0', rest = orphans or ''}
  elseif top > rec.life or lost then -- others know more of this region than it does: it lost its memory
    is.life, is.sequence, again, far.heard = math.max(now, top + 1, rec.life + 1), 0, true, true
    is.rest = string.gsub(is.rest, '( %*[^:]+):.*$', '%1:f') -- its shards were gathered by the life that is over
  elseif kind == 'sum' then
    local mine = far.by[partName(kind, self, rec.life)]
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
      if string.sub(redis.call('GET', registersKey), 17) ~= string.sub(was, 17) then new, empties = true, true end -- behind the head, which has a guess
    end
    value = string.format('%.0f', redis.call('PFCOUNT', registersKey))
  else
    local all = elsewhere(far, kind)
    if kind == 'sum' and is.sequence == 0 then own = '0' end -- what this life had is a part of a former one
    value = all and plus(own, all)
  end
  if not value or #value > 18 and string.find(is.rest, ' *', 1, true) and string.sub(is.rest, -2) ~= ':f' then
    odd = odd + 1
    return
  end
  local field = writeFar(far)
  if field and field ~= before then redis.call('HSET', fars, key, field) end
  if not rec or is.sequence == 0 or empties or value ~= is.value then
    is.value, is.sequence = value, is.sequence + 1
    is.at = string.format('%.0f', math.max(tonumber(is.at), tonumber(at)))
    redis.call('HSET', counters, key, text(is))
    tell(key, is, empties and kind == 'members')
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
  redis.call('HINCRBY', state, 'shared', 1) -- what others have to know of it is in the log
end
return {'merged', place, news, odd, older}
