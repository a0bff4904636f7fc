-- counter_apply.lua: make operations on counters in order, each as a whole or not at all.
--
-- It does in Redis what counter/judge.go does in Go. First it reads the arguments and all counters. Then it judges
-- one operation after another and changes the states in memory only, so that a refusal never has to undo a write. At
-- the end it writes states, histories, ledgers and identities, and publishes one update for each bucket. Registers are
-- the exception: PFADD is the only way to learn whether they change, so they are written at once.
--
-- "In front" means that Redis is the cache tier of PostgreSQL (package tiered).
--
-- KEYS     for each bucket hc:{n}:c and hc:{n}:s (see the README); in front also hc:{n}:d, :t, :j and :a; with other
--          regions also hc:{n}:f, :log and :gone. Then the keys of identities. The script makes the keys of a single
--          counter itself, in the slot of its bucket. On a Cluster the call names them all the same, so that Redis
--          refuses it at the start when the slot is being moved and one of them is on another node
-- ARGV     1  PUBLISH or SPUBLISH
--          2  how long an identity is remembered, ms
--          3  maximum number of members that an update names
--          4  retention of a ledger whose rule gives none, ms
--          5  maximum number of values of a dimension with a count of their own
--          6  1: in front
--          7  this region, or "" without other regions
--          8  in front, maximum number of changes of a bucket that are not persisted yet
--          9  1: a counter that does not exist has to be looked for in the other bucket first
--          10 number of buckets, and for each the index of its first key, and its channel
--          then the number of rules, and for each: kind, floor or "", ceiling or "", retention of its ledger in ms, match
--          if it has top lists or "", number of time bucket lengths, and for each its length in s and retention in ms
--          then operations, to the end: index of the identity's key and index of its bucket, or 0 and 0; 1: PostgreSQL
--          does not know the identity; number of changes, and for each verb, key, index of bucket, index of rule, 1:
--          the counter is in no other bucket, and the arguments that readers (below) parse
-- Returns  "busy": a bucket is frozen; in front also "lost": a bucket may have lost data, and "full": see ARGV[8].
--          Otherwise four values: a list with "", "replay" or a refusal for each operation; a list of the states of the
--          counters after the call, in the order of their first mention. If there are fewer results than operations,
--          the next operation cannot be made yet: 1 if PostgreSQL has to be asked for its identity; a list of the
--          counters that have to be loaded
-- Safe to repeat and to arrive late for operations with an identity. Others are made again each time. O(changes).
--#include counter_number.lua
--#include counter_front.lua
--#include counter_updates.lua

local command, remember, toldMost, keptDefault, values = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local inFront, region, room, looks = ARGV[6] == '1', ARGV[7], tonumber(ARGV[8]), ARGV[9] == '1'
if region == '' then region = nil end
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local nowText = string.format('%.0f', now)

-- One state for each key, however many changes name it: later changes see what earlier ones did.
local ops, buckets, states, order, at = {}, {}, {}, {}, 10
do
  for i = 1, tonumber(ARGV[10]) do
    local k = tonumber(ARGV[9 + 2 * i])
    local b = {counters = KEYS[k], state = KEYS[k + 1], channel = ARGV[10 + 2 * i], keys = {}}
    k = k + 1
    if inFront then
      b.dirty, b.taken, b.journal, b.ages = KEYS[k + 1], KEYS[k + 2], KEYS[k + 3], KEYS[k + 4]
      b.front = front(b.state)
      if not b.front then return 'lost' end
      k = k + 4
    end
    if region then b.fars, b.log, b.gone = KEYS[k + 1], KEYS[k + 2], KEYS[k + 3] end
    buckets[i] = b
  end
  at = 11 + 2 * #buckets
end

-- list parses a list: its length, then its elements.
local function list()
  local all, n = {}, tonumber(ARGV[at])
  for i = 1, n do all[i] = ARGV[at + i] end
  at = at + 1 + n
  return all
end

-- Of a time bucket, number is the index of the running one, and head the beginning of its text in the slots of a sum.
local rules = {}
for i = 1, tonumber(ARGV[at]) do
  local rule, n = {kind = ARGV[at + 1], floor = ARGV[at + 2], ceiling = ARGV[at + 3], kept = tonumber(ARGV[at + 4]), top = ARGV[at + 5], steps = {}}, tonumber(ARGV[at + 6])
  at = at + 6
  for k = 1, n do
    local step = {step = tonumber(ARGV[at + 1]), kept = tonumber(ARGV[at + 2])}
    step.number = math.floor(now / 1000 / step.step)
    step.head = string.format(' %.0f:%.0f:', step.step, step.number)
    rule.steps[k] = step
    at = at + 2
  end
  rules[i] = rule
end
at = at + 1

local readers = {
  add = function(c)
    c.delta, c.merged, c.reason, c.by = ARGV[at], ARGV[at + 1] == '1', ARGV[at + 2], ARGV[at + 3]
    at = at + 4
    c.dimensions = list() -- name, value, name, value …
  end,
  edit = function(c) c.join, c.leave = list(), list() end,
  reset = function(c)
    c.reason, c.by = ARGV[at], ARGV[at + 1]
    at = at + 2
  end,
  delete = function() end,
  reshard = function(c)
    c.step, c.epoch, c.time = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2])
    at = at + 3
    c.shards = list() -- value, sequence, value, sequence …
  end,
}
readers.adjust, readers.set = readers.add, readers.add

while ARGV[at] do
  local op, n = {id = KEYS[tonumber(ARGV[at])], home = buckets[tonumber(ARGV[at + 1])], asked = ARGV[at + 2] == '1', changes = {}}, tonumber(ARGV[at + 3])
  at = at + 4
  for i = 1, n do
    local key, b = ARGV[at + 1], buckets[tonumber(ARGV[at + 2])]
    local c = {at = i - 1, verb = ARGV[at], key = key, rule = rules[tonumber(ARGV[at + 3])], looked = ARGV[at + 4] == '1'}
    at = at + 5
    readers[c.verb](c)
    if not states[key] then
      states[key] = {key = key, bucket = b}
      order[#order + 1] = key
      b.keys[#b.keys + 1] = key
    end
    op.changes[i] = c
  end
  ops[#ops + 1] = op
end

-- keyOf returns the key with that prefix of one counter.
local function keyOf(s, name) return journalKey(s.bucket.counters, name, s.key) end

-- text returns the record of a counter as hc:{n}:c has it, or nil if the counter does not exist.
local function text(s)
  if not s.kind then return nil end
  return s.kind .. ' ' .. s.value .. ' ' .. s.at .. ' ' .. s.incarnation .. string.format(' %.0f %.0f', s.sequence, s.entries) .. s.slots .. s.mark
end

-- load reads the records of all counters.
local function load()
  for _, b in ipairs(buckets) do
    for from = 1, #b.keys, 1000 do
      local some = {unpack(b.keys, from, math.min(from + 999, #b.keys))}
      for i, found in ipairs(redis.call('HMGET', b.counters, unpack(some))) do
        local s = states[some[i]]
        s.was = found
        s.value, s.sequence, s.entries, s.slots, s.mark = '0', 0, 0, '', ''
        if found == false then
          s.cold = inFront
        elseif found ~= '-' then
          local kind, value, at, incarnation, sequence, entries, slots = string.match(found, '^(%S+) (%S+) (%S+) (%S+) (%S+) (%S+)(.*)$')
          s.kind, s.value, s.at, s.incarnation, s.slots = kind, value, at, incarnation, slots
          s.sequence, s.entries = tonumber(sequence), tonumber(entries)
          local mark = string.find(slots, ' *', 1, true)
          if mark then s.slots, s.mark = string.sub(slots, 1, mark - 1), string.sub(slots, mark) end
        end
      end
    end
  end
end

for _, b in ipairs(buckets) do
  local frozen = redis.call('HGET', b.state, 'until')
  if frozen and now < tonumber(frozen) then return 'busy' end
  if inFront and redis.call('HLEN', b.dirty) + redis.call('LLEN', b.journal) + b.front.pending > room then return 'full' end
end
load()

-- unknown returns the keys of an operation's counters that may exist outside their bucket: in front, those that are not
-- resident; otherwise those that do not exist, because a former rule may have put them into another bucket.
local function unknown(op)
  local keys
  for _, c in ipairs(op.changes) do
    local s = states[c.key]
    if inFront and s.cold or looks and not s.was and not c.looked then
      keys = keys or {}
      keys[#keys + 1] = c.key
    end
  end
  return keys
end

-- What to write after all operations are judged.
local to = {ledgers = {}, histories = {}, counts = {}, journals = {}, marks = {}, sharded = {}, ids = {}, told = {}, tellings = {}}

local regions = region and (function()
--#include counter_remote.lua
  return {
    read = readRemote, write = writeRemote, elsewhere = elsewhere, takeAway = takeAway, after = after, noteChange = noteChange, bury = bury,
  }
end)()

-- farOf returns the replica state of a counter. Whoever changes it sets s.moved. A counter that does not exist has no
-- parts: any that are stored were left by a process without regions, which deleted the counter.
local function farOf(s)
  if not s.far then
    s.far = regions.read(redis.call('HGET', s.bucket.fars, s.key), s.kind)
    if not s.kind and #s.far.list > 0 then
      s.far.list, s.far.by, s.moved = {}, {}, true
    end
  end
  return s.far
end

local function deleted(b)
  if not b.deleted then b.deleted = tonumber(redis.call('HGET', b.state, 'deleted') or 0) end
  return b.deleted
end

-- refuse returns a refusal. batch.go makes a counter.Conflict from it.
local function refuse(s, c, why, detail)
  return {c.at, s.value, s.kind or c.rule.kind, why, detail or ''}
end

-- begin creates a counter: it gets the kind of its rule, and an incarnation that was never used for its key.
local function begin(s, c)
  if not s.kind then
    if region and c.rule.kind ~= 'exact' then farOf(s) end -- before kind is set: farOf drops the parts of a missing counter
    s.kind = c.rule.kind
    -- In front, the clock is not enough: versions that this Redis lost may be newer. front().least is above them.
    local least = inFront and s.bucket.front.least or now
    s.incarnation = string.format('%.0f', math.max(least, deleted(s.bucket) + 1))
  end
end

-- moved gives a changed counter its next version. In front, it also raises an incarnation from before a loss of data.
local function moved(s)
  local least = inFront and s.bucket.front.least
  if least and tonumber(s.incarnation) < least then s.incarnation = string.format('%.0f', least) end
  s.sequence, s.at = s.sequence + 1, nowText
end

-- enter adds a ledger entry for a change after which the value is s.value.
local function enter(s, c, name, delta)
  s.entries = s.entries + 1
  local key = keyOf(s, 'l')
  local l = to.ledgers[key]
  if not l then
    l = {}
    to.ledgers[key] = l
  end
  l.bucket = s.bucket
  l.kept = s.kind == 'exact' and c.rule.kind == 'exact' and c.rule.kept or keptDefault
  l[#l + 1] = {string.format('%.0f', s.entries) .. '-' .. s.at, 'op', name, 'delta', delta, 'after', s.value, 'reason', c.reason, 'by', c.by}
end

-- tell notes that a counter changed, for the publication.
local function tell(s)
  local t = to.told[s.key]
  if not t then
    t = {places = {}, count = 0}
    to.told[s.key] = t
    to.tellings[#to.tellings + 1] = s.key
  end
  return t
end

-- tellMember notes that a member joined (true) or left (false).
local function tellMember(t, name, is)
  if t.all then return end
  if t.places[name] == nil then t.count = t.count + 1 end
  t.places[name] = is
  if t.count > toldMost then t.all = true end
end

-- A sharded sum has a mark behind its slots, ' *epoch:s:value/sequence,…', what of each of its shards is in it already, and one
-- that is whole again ' *epoch:f'; package hot has the way. Numbers are kept short meanwhile, so that gathering never overflows.
local SHORT = 17
local function sharded(s) return s.mark ~= '' and string.sub(s.mark, -2) ~= ':f' end

-- number returns the value of a number after a change, or nil and the refusal. It changes nothing.
local function number(s, c)
  local kind = s.kind or c.rule.kind
  if kind ~= 'sum' and kind ~= 'exact' then return nil, refuse(s, c, 'kind', 'number') end
  if c.merged and kind ~= 'sum' then return nil, refuse(s, c, 'kind', 'merged') end
  local after = plus(s.value, c.delta)
  local mine = after -- this region's part must fit in 64 bits, too, even when the parts of others make the total smaller
  if after and region and kind == 'sum' then mine = minus(after, regions.elsewhere(farOf(s), kind)) end
  -- The increments of the shards may bring the value back into 64 bits, so a sharded sum is merged before it overflows.
  if sharded(s) and (not mine or math.max(#after, #mine) > SHORT + 1) then return nil, refuse(s, c, 'sharded') end
  if not mine then return nil, refuse(s, c, 'overflow') end
  if kind == 'exact' then
    local falls = string.sub(c.delta, 1, 1) == '-'
    if c.rule.floor ~= '' and falls and compare(after, c.rule.floor) < 0 then return nil, refuse(s, c, 'floor', c.rule.floor) end
    if c.rule.ceiling ~= '' and not falls and compare(after, c.rule.ceiling) > 0 then return nil, refuse(s, c, 'ceiling', c.rule.ceiling) end
  end
  return after
end

-- history returns the list of completed time buckets to append to a key: the history itself or, in front, the journal
-- that the next checkpoint persists.
local function history(key, s)
  local h = to.histories[key]
  if not h then
    h = {bucket = s.bucket}
    to.histories[key] = h
  end
  return h
end

-- within returns value + delta, or the nearest number of 64 bits.
local function within(value, delta) return plus(value, delta) or string.sub(delta, 1, 1) == '-' and LEAST or MOST end

-- turn adds delta to the slots of s in the general case: a time bucket is complete and moves to the history, or the
-- rule has other lengths than the slots.
local function turn(s, rule, delta)
  local was, is = {}, {}
  for step, number, value in string.gmatch(s.slots, ' (%d+):(%d+):(%S+)') do was[step] = {tonumber(number), value} end
  for i, b in ipairs(rule.steps) do
    local step = string.format('%.0f', b.step)
    local slot = was[step]
    was[step] = nil
    if slot and slot[1] >= b.number then
      slot[2] = within(slot[2], delta)
    else
      if slot then
        local h = history(keyOf(s, inFront and 'b' or 'g' .. step), s)
        h.step, h.kept = b.step, b.kept
        h[#h + 1] = {step .. ':' .. string.format('%.0f', slot[1]), string.format('%.0f', slot[1]), slot[2], string.format('%.0f', b.kept)}
      end
      slot = {b.number, delta}
    end
    is[i] = ' ' .. step .. ':' .. string.format('%.0f', slot[1]) .. ':' .. slot[2]
  end
  for step, slot in pairs(was) do -- slots of a former rule stay as long as there is room for them
    if #is < 4 then is[#is + 1] = ' ' .. step .. ':' .. string.format('%.0f', slot[1]) .. ':' .. slot[2] end
  end
  return table.concat(is)
end

-- gain adds delta to the running time buckets of a sum. In the usual case all slots are those of the rule, in order,
-- and the loop only replaces their numbers. With marked it also marks the sum as a candidate for the top list: the
-- increments of shards have passed no TopTracker.
local function gain(s, rule, delta, marked)
  if #rule.steps == 0 or s.kind ~= 'sum' then return end
  local is, from = {}, 1
  for i, b in ipairs(rule.steps) do
    local value = from + #b.head
    if string.sub(s.slots, from, value - 1) ~= b.head then break end
    from = string.find(s.slots, ' ', value, true) or #s.slots + 1
    is[i] = b.head .. within(string.sub(s.slots, value, from - 1), delta)
  end
  if #is == #rule.steps and from > #s.slots then s.slots = table.concat(is) else s.slots = turn(s, rule, delta) end
  if marked and rule.top ~= '' then
    to.marks[#to.marks + 1] = {journalKey(s.bucket.counters, 'z', rule.top), string.match(s.slots, '^ %d+:(%d+)') .. ':' .. s.key}
  end
end

-- count notes the values of the dimensions of an addition to a sum.
local function count(s, c)
  if #c.dimensions == 0 or s.kind ~= 'sum' then return end
  local key = keyOf(s, 'e')
  local list = to.counts[key]
  if not list then
    list = {bucket = s.bucket}
    to.counts[key] = list
  end
  for i = 1, #c.dimensions, 2 do list[#list + 1] = {c.dimensions[i], c.dimensions[i + 1], c.delta} end
end

-- copy returns the fields of s that add changes.
local function copy(s)
  return {s.kind, s.value, s.at, s.incarnation, s.sequence, s.entries}
end

-- add makes all additions of a list, or returns the refusal of one and makes none. Slots, dimensions and ledgers
-- follow when no number can be refused any more.
local function add(changes)
  local before = {}
  for i, c in ipairs(changes) do
    local s = states[c.key]
    local after, refusal = number(s, c)
    if refusal then
      for j = i - 1, 1, -1 do
        local o, b = states[changes[j].key], before[j]
        o.kind, o.value, o.at, o.incarnation, o.sequence, o.entries = b[1], b[2], b[3], b[4], b[5], b[6]
      end
      refusal[2] = s.value -- the value before the operation, after the loop above restored it
      return refusal
    end
    if #changes > 1 then before[i] = copy(s) end
    begin(s, c)
    s.value = after
    moved(s)
    c.after = after
  end
  for _, c in ipairs(changes) do
    local s = states[c.key]
    if c.verb ~= 'add' or s.kind == 'exact' then
      local last = s.value
      s.value = c.after -- for the entry only: s.value already has the later changes of this list
      enter(s, c, c.verb ~= 'add' and c.verb or string.sub(c.delta, 1, 1) == '-' and 'decrement' or 'increment', c.delta)
      s.value = last
    end
    if c.verb == 'add' then
      gain(s, c.rule, c.delta)
      count(s, c)
    end
    tell(s)
  end
end

-- others makes the functions for all verbs but additions. Lua creates a function object whenever it reaches a
-- definition, and that is most of the time of a short run; additions, the most frequent changes, should not pay for
-- these.
local function others()
--#include counter_set.lua
--#include counter_steps.lua
  -- reshard makes a step of a sharded sum; one that is late or repeated changes nothing.
  local function reshard(s, c)
    local epoch = string.match(s.mark, '^ %*([^:]+):')
    if c.step == 'split' then
      if s.kind ~= 'sum' or sharded(s) or #s.value > SHORT then return nil end
      if region and #(minus(s.value, regions.elsewhere(farOf(s), 'sum')) or MOST) > SHORT then return nil end
      local incarnation, last = string.match(epoch or '', '^(%d+)%.(%d+)$')
      s.mark = ' *' .. s.incarnation .. '.' .. string.format('%.0f', incarnation == s.incarnation and last + 1 or 1) .. ':s'
      to.sharded[s.key] = true
      return nil
    end
    if c.step == 'merge' and not sharded(s) then to.sharded[s.key] = false end
    if not sharded(s) or epoch ~= c.epoch then return nil end
    local has, delta, moves, is = {}, '0', 0, {}
    for value, sequence in string.gmatch(s.mark, '(%-?%d+)/(%d+)') do has[#has + 1] = {value, tonumber(sequence)} end
    for i = 1, #c.shards / 2 do
      local was, p = has[i] or {'0', 0}, {c.shards[2 * i - 1], tonumber(c.shards[2 * i])}
      if p[2] > was[2] then
        delta, moves = plus(plus(delta, p[1]), opposite(was[1])), moves + p[2] - was[2]
        was = p
      end
      is[i] = was[1] .. '/' .. string.format('%.0f', was[2])
    end
    if moves > 0 then
      s.mark = ' *' .. epoch .. ':s:' .. table.concat(is, ',')
      s.value, s.sequence = plus(s.value, delta), s.sequence + moves
      s.at = string.format('%.0f', math.max(tonumber(s.at), c.time))
      gain(s, c.rule, delta, string.sub(delta, 1, 1) ~= '-')
      tell(s)
    end
    if c.step == 'merge' then
      s.mark, to.sharded[s.key] = ' *' .. epoch .. ':f', false
      if s.sequence == 0 then -- it was deleted elsewhere, and its shards had nothing more
        s.kind, s.value, s.at, s.incarnation, s.mark = nil, '0', nil, nil, ''
      end
    end
  end

  -- set returns the open set of a counter; fresh: an empty one, which replaces it.
  local sets = {}
  local function set(s, fresh)
    if fresh or not sets[s.key] then sets[s.key] = openSet(keyOf(s, 'm'), fresh) end
    return sets[s.key]
  end

  -- journal returns the members that joined or left since the last checkpoint, for PostgreSQL; fresh: all earlier
  -- members are gone.
  local function journal(s, fresh)
    if not inFront then return {} end
    local key = keyOf(s, 'p')
    if fresh or not to.journals[key] then to.journals[key] = {bucket = s.bucket, fresh = fresh, places = {}} end
    return to.journals[key].places
  end

  -- keep preserves registers for the checkpoint that is being drained. It must be called before they change.
  local function keep(s)
    if inFront and not s.kept and s.was and string.sub(s.was, 1, 7) == 'unique ' then keepRegisters(s.bucket.counters, s.bucket.taken, s.key) end
    s.kept = true
  end

  -- dropRegisters and observe write at once. That is safe: an operation with registers has one change, which cannot
  -- be refused any more, and a Redis that refuses writes refuses the first write of a script, before anything is
  -- changed.
  local function dropRegisters(s)
    keep(s)
    redis.call('UNLINK', keyOf(s, 'r'))
  end

  -- see adds members to the registers of the running time buckets of a unique, and deletes buckets that are no longer
  -- needed: in front, those that are complete and persisted, otherwise those whose retention is over.
  local function see(s, c, names)
    if c.rule.kind ~= 'unique' then return end
    local list, b = keyOf(s, 'v'), s.bucket
    for _, bucket in ipairs(c.rule.steps) do
      local name = tostring(bucket.step) .. ':' .. string.format('%.0f', bucket.number)
      local registers = stepKey(list, name)
      if redis.call('PFADD', registers, unpack(names)) == 1 then
        local keeps = bucket.kept + 3000 * bucket.step
        local fresh = redis.call('ZADD', list, string.format('%.0f', now + keeps), name) == 1
        if inFront then
          s.saw = true
          local gained = keyOf(s, 'b')
          local h = history(gained, s) -- written at the end, because a delete of this call has to come before it
          if not h[name] and (h.drop or redis.call('HEXISTS', gained, name) == 0) then
            h[name] = true
            h[#h + 1] = {name, '0', '0', string.format('%.0f', bucket.kept)}
          end
        else
          redis.call('PEXPIRE', registers, string.format('%.0f', keeps))
          redis.call('PEXPIRE', list, string.format('%.0f', math.max(keeps, 1000 * redis.call('TTL', list) + 1000)))
        end
        if fresh then
          for _, old in ipairs(redis.call('ZRANGEBYSCORE', list, '-inf', inFront and '+inf' or string.format('%.0f', now))) do
            local step, number = string.match(old, '^(%d+):(%d+)$')
            if not inFront or (number + 1) * step * 1000 <= now
              and redis.call('HEXISTS', keyOf(s, 'b'), old) + redis.call('HEXISTS', keyOf(s, 'bt'), old) == 0 then
              redis.call('UNLINK', stepKey(list, old))
              redis.call('ZREM', list, old)
            end
          end
        end
      end
    end
  end

  -- observe adds members to registers.
  local function observe(s, c)
    if #c.leave > 0 then return refuse(s, c, 'kind', 'unique') end
    keep(s)
    local names = {}
    for i, m in ipairs(c.join) do names[i] = string.sub(m, WIDTH + 1) end
    if redis.call('PFADD', keyOf(s, 'r'), unpack(names)) == 1 then
      begin(s, c)
      s.value = string.format('%.0f', redis.call('PFCOUNT', keyOf(s, 'r')))
      moved(s)
      tell(s)
    end
    see(s, c, names)
  end

  -- HISTORIES has the prefixes of all histories that a sum may have, one for each length of counter.BucketSteps.
  local HISTORIES = {'g1', 'g10', 'g60', 'g300', 'g900', 'g3600', 'g86400'}

  -- change makes one change that is not an addition, or returns the refusal.
  local function change(c)
    local s = states[c.key]
    local kind = s.kind or c.rule.kind
    if c.verb == 'reshard' then return reshard(s, c) end
    if (c.verb == 'reset' or c.verb == 'delete') and sharded(s) then return refuse(s, c, 'sharded') end
    if c.verb == 'reset' then
      if s.value == '0' then return nil end
      local delta, own = opposite(s.value), '0'
      if region and kind == 'sum' then own = minus(s.value, regions.elsewhere(farOf(s), kind)) end
      if not delta or not own or not opposite(own) then return refuse(s, c, 'overflow', 'opposite') end
      local t = tell(s)
      if kind == 'members' then
        set(s, true)
        journal(s, true)
        t.all = true
      elseif kind == 'unique' then
        dropRegisters(s)
      end
      if region and kind ~= 'exact' then
        local far = farOf(s)
        if kind == 'sum' then
          regions.takeAway(far, region, tonumber(s.incarnation), s.sequence, own)
        else
          s.far = {died = far.died, emptied = regions.after(far, now, far.emptied, tonumber(s.incarnation)), list = {}, by = {}}
        end
        s.moved = true
      end
      s.value = '0'
      moved(s)
      enter(s, c, 'reset', delta)
    elseif c.verb == 'delete' then
      if not s.kind then return nil end
      local b = s.bucket
      b.deleted, b.died = math.max(deleted(b), tonumber(s.incarnation)), true
      if s.kind == 'members' then
        set(s, true)
        journal(s, true)
      elseif s.kind == 'unique' then
        dropRegisters(s)
        dropSteps(keyOf(s, 'v'))
      end
      if region and s.kind ~= 'exact' then
        local far = farOf(s)
        s.far, s.moved, s.buried = {died = regions.after(far, now, far.died, tonumber(s.incarnation)), emptied = 0, list = {}, by = {}}, true, true
        b.deleted = math.max(b.deleted, s.far.died)
      end
      s.dropped = true
      to.ledgers[keyOf(s, 'l')] = {drop = true}
      for _, name in ipairs(inFront and {'b'} or HISTORIES) do to.histories[keyOf(s, name)] = {bucket = b, drop = true} end -- whichever lengths former rules had
      to.counts[keyOf(s, 'e')] = {bucket = b, drop = true}
      s.kind, s.value, s.at, s.incarnation, s.sequence, s.entries, s.slots, s.mark = nil, '0', nil, nil, 0, 0, '', ''
      tell(s).all = true
    else
      if kind == 'unique' then return observe(s, c) end
      if kind ~= 'members' then return refuse(s, c, 'kind', 'members') end
      local others = region and regions.elsewhere(farOf(s), kind) or '0'
      local members, size, changed = set(s), tonumber(minus(s.value, others)), {}
      for _, m in ipairs(c.join) do
        if join(members, string.sub(m, 1, WIDTH), size) then
          size = size + 1
          changed[#changed + 1] = {string.sub(m, WIDTH + 1), true}
        end
      end
      for _, m in ipairs(c.leave) do
        local hash, name = string.sub(m, 1, WIDTH), string.sub(m, WIDTH + 1)
        if leave(members, hash) then
          size = size - 1
          changed[#changed + 1] = {name, false}
        end
      end
      if #changed == 0 then return nil end
      begin(s, c)
      s.value = plus(string.format('%.0f', size), others)
      moved(s)
      if size == 0 then set(s, true) end -- deletes the hash with its number of parts
      local t, places = tell(s), journal(s)
      for _, m in ipairs(changed) do
        tellMember(t, m[1], m[2])
        places[m[1]] = m[2] and '1' or '0'
      end
    end
  end

  return change, function()
    for _, s in pairs(sets) do keepSet(s) end
  end
end

-- make makes an operation, or returns the refusal.
local change, keepSets
local function make(op)
  local c = op.changes[1]
  if c.verb == 'add' or c.verb == 'adjust' then return add(op.changes) end
  if c.verb == 'set' then
    local s = states[c.key]
    if (s.kind or c.rule.kind) ~= 'exact' then return refuse(s, c, 'kind', 'exact') end
    local delta = minus(c.delta, s.value)
    if not delta then return refuse(s, c, 'overflow', 'far') end
    if delta == '0' then return nil end
    c.delta = delta
    return add(op.changes)
  end
  if not change then change, keepSets = others() end
  return change(c)
end

local function replay(op) return op.id and (to.ids[op.id] or redis.call('EXISTS', op.id) == 1) end

-- Judge the operations in order. At the first one that cannot be judged yet, because a counter has to be loaded or
-- PostgreSQL may know its identity, stop: later operations must not overtake it. missing then has all keys that the
-- rest of the call lacks, so that one round trip loads them.
local results, ask, missing = {}, 0, {}
for i, op in ipairs(ops) do
  local repeated = replay(op)
  local lacks = not repeated and unknown(op)
  if repeated then
    results[i] = 'replay'
  elseif lacks or op.id and inFront and not op.asked and now < op.home.front.asks then
    if not lacks then ask = 1 end
    for j = i, #ops do
      if not replay(ops[j]) then
        for _, key in ipairs(unknown(ops[j]) or {}) do missing[#missing + 1] = key end
      end
    end
    break
  else
    local refusal = make(op)
    if op.id and not refusal then to.ids[op.id] = op.home or true end
    results[i] = refusal and table.concat(refusal, ' ') or ''
  end
end

-- Everything is judged; from here on the script writes.
local after = {}
for i, key in ipairs(order) do
  local s = states[key]
  local is = text(s)
  s.is, after[i] = is, is or ''
  if inFront then
    is = is or '-'
    if not s.cold and (is ~= s.was or s.dropped or s.saw) then
      local b = s.bucket
      fix(b.counters, b.taken, key, s.was)
      redis.call('HSET', b.counters, key, is)
      if s.dropped then redis.call('HSET', b.dirty, key, 'x') else redis.call('HSETNX', b.dirty, key, '') end
      redis.call('HSETNX', b.state, 'since', nowText)
      redis.call('ZADD', b.ages, is == '-' and 1 or now, key)
    end
  elseif is and is ~= s.was then
    redis.call('HSET', s.bucket.counters, key, is)
  elseif s.was and not is then
    redis.call('HDEL', s.bucket.counters, key)
  end
end
-- With other regions, write replica state and put changed counters into the log of their bucket.
for _, key in ipairs(region and order or {}) do
  local s = states[key]
  local b, is, was = s.bucket, s.is, s.was or nil
  if s.kind and s.kind ~= 'exact' and is ~= was and farOf(s).heard then s.far.heard, s.moved = false, true end
  if s.moved then
    local far = regions.write(s.far)
    if far then redis.call('HSET', b.fars, key, far) else redis.call('HDEL', b.fars, key) end
    if s.buried then regions.bury(b.counters, b.fars, b.gone, key, s.far.died, now) end
  end
  if s.moved or is ~= was and s.kind ~= 'exact' then regions.noteChange(b.state, b.log, key) end
end
for key, is in pairs(to.sharded) do
  local list = string.sub(states[key].bucket.counters, 1, -2) .. 'h'
  if is then redis.call('HSET', list, key, '') else redis.call('HDEL', list, key) end
end
-- Ledgers are trimmed here, at most 256 entries at a time.
for ledger, l in pairs(to.ledgers) do
  if l.drop then redis.call('UNLINK', ledger) end
  for _, e in ipairs(l) do redis.call('XADD', ledger, unpack(e)) end
  if inFront and #l > 0 then redis.call('HINCRBY', l.bucket.state, 'pending', #l) end
  if l.kept and l.kept > 0 then
    local function old(e) return tonumber(string.match(e[1], '%-(%d+)$')) + l.kept <= now end
    local oldest = redis.call('XRANGE', ledger, '-', '+', 'COUNT', 1)[1]
    if oldest and old(oldest) then
      local stays
      for _, e in ipairs(redis.call('XRANGE', ledger, '-', '+', 'COUNT', 256)) do
        stays = e[1]
        if not old(e) then break end
      end
      redis.call('XTRIM', ledger, 'MINID', stays)
    end
  end
end
for key, h in pairs(to.histories) do
  if h.drop then redis.call('UNLINK', key) end
  if #h > 0 and inFront then
    for _, g in ipairs(h) do redis.call('HSET', key, g[1], g[3] .. ' ' .. g[4]) end
    redis.call('HINCRBY', h.bucket.state, 'pending', #h)
  elseif #h > 0 then
    local list = {}
    for i, g in ipairs(h) do list[i] = g[2] .. ':' .. g[3] .. ' ' end
    redis.call('APPEND', key, table.concat(list))
    redis.call('PEXPIRE', key, string.format('%.0f', h.kept + 3000 * h.step))
    -- Expired entries are cut off when they are a quarter of the rest, so an entry is copied four times at most.
    local function over(number, kept) return (tonumber(number) + 2) * 1000 * h.step <= now - kept end
    if over(string.match(redis.call('GETRANGE', key, 0, 20), '^%d+'), h.kept * 1.25) then
      local stays, text = 1, redis.call('GET', key)
      for number, after in string.gmatch(text, '(%d+):%S+ ()') do
        if not over(number, h.kept) then break end
        stays = after
      end
      redis.call('SET', key, string.sub(text, stays), 'KEEPTTL')
    end
  end
end
-- A field is name:value. The field of the empty value has the shared count of all values without a field, and the
-- number of those with one.
for key, list in pairs(to.counts) do
  if list.drop then redis.call('UNLINK', key) end
  for _, d in ipairs(list) do
    local all, delta = d[1] .. ':', d[3]
    local field = all .. d[2]
    local is = redis.call('HGET', key, field)
    if is then
      redis.call('HSET', key, field, within(is, delta))
    else
      local other, kept = string.match(redis.call('HGET', key, all) or '0 0', '^(%S+) (%d+)$')
      if tonumber(kept) < values then
        redis.call('HSET', key, field, delta, all, other .. ' ' .. string.format('%.0f', kept + 1))
        if inFront then redis.call('HINCRBY', list.bucket.state, 'pending', 1) end
      else
        redis.call('HSET', key, all, within(other, delta) .. ' ' .. kept)
      end
    end
  end
end
for _, m in ipairs(to.marks) do redis.call('SADD', m[1], m[2]) end
if keepSets then keepSets() end
for id, bucket in pairs(to.ids) do
  redis.call('SET', id, '', 'PX', remember)
  if inFront then redis.call('RPUSH', bucket.journal, string.match(id, ':i:(.+)$')) end
end
for key, j in pairs(to.journals) do
  local n = 0
  if j.fresh then
    redis.call('UNLINK', key)
    redis.call('HSET', key, '', '')
  end
  for name, is in pairs(j.places) do
    redis.call('HSET', key, name, is)
    n = n + 1
  end
  redis.call('HINCRBY', j.bucket.state, 'pending', n)
end
for _, b in ipairs(buckets) do
  if b.died then redis.call('HSET', b.state, 'deleted', string.format('%.0f', b.deleted)) end
end
local news = {}
for _, key in ipairs(to.tellings) do
  local t, s = to.told[key], states[key]
  local list = news[s.bucket]
  if not list then
    list = {}
    news[s.bucket] = list
  end
  noteUpdate(list, key, s.is, t.all, t.places)
end
for b, updates in pairs(news) do
  publishUpdates(command, b.channel, b.state, updates)
  if region then redis.call('HINCRBY', b.state, 'shared', 1) end -- counter_log.lua compares it with the number of publications
end
return {results, after, ask, missing}
