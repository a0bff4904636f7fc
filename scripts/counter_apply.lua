-- counter_apply.lua: make operations on counters in order, each as a whole or not at all.
--
-- It does in Redis what counter/judge.go does in Go. First it reads the arguments and all counters. Then it judges
-- one operation after another and changes the states in memory only, so that a refusal never has to undo a write. At
-- the end it writes states, histories, ledgers and idempotency keys, and publishes one update for each bucket. Registers are
-- the exception: PFADD is the only way to learn whether they change, so they are written at once.
--
-- "In front" means that Redis is the cache tier of PostgreSQL (package tiered).
--
-- KEYS     for each bucket hc:{n}:c and hc:{n}:s (see the README); in front also hc:{n}:d, :t, :j and :a; with other
--          regions also hc:{n}:f, :log and :gone. Then the keys of idempotency keys. The script makes the keys of a single
--          counter itself, in the slot of its bucket. On a Cluster the call names them all the same, so that Redis
--          refuses it at the start when the slot is being moved and one of them is on another node
-- ARGV     1  PUBLISH or SPUBLISH
--          2  how long an idempotency key is remembered, ms
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
--          then operations, to the end: index of the idempotency key's key and index of its bucket, or 0 and 0; 1: PostgreSQL
--          does not know the idempotency key; number of changes, and for each verb, key, index of bucket, index of rule, 1:
--          the counter is in no other bucket, and the arguments that readers (below) parse
-- Returns  in front "lost": a bucket may have lost data, or "full": see ARGV[8]. Otherwise four values: a list with "",
--          "replay" or a refusal for each operation; a list of the states of the counters after the call, in the order of
--          their first mention. If there are fewer results than operations, the next operation cannot be made yet: 1 if
--          PostgreSQL has to be asked for its idempotency key; a list of the counters that have to be loaded
-- Safe to repeat and to arrive late for operations with an idempotency key. Others are made again each time. O(changes).
--#include counter_number.lua
--#include counter_front.lua
--#include counter_updates.lua

local command, remember, maxNamed, keptDefault, values = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local inFront, region, room, looks = ARGV[6] == '1', ARGV[7], tonumber(ARGV[8]), ARGV[9] == '1'
if region == '' then region = nil end
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local nowText = string.format('%.0f', now)

-- One state for each key, however many changes name it: later changes see what earlier ones did.
local ops, buckets, states, order = {}, {}, {}, {}
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
    if region then b.remotes, b.log, b.gone = KEYS[k + 1], KEYS[k + 2], KEYS[k + 3] end
    buckets[i] = b
  end
end
local at = 11 + 2 * #buckets

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
local to = {ledgers = {}, histories = {}, counts = {}, journals = {}, marks = {}, sharded = {}, ids = {}, updates = {}, updated = {}}

local regions = region and (function()
--#include counter_remote.lua
  return {
    read = readRemote, write = writeRemote, elsewhere = elsewhere, takeAway = takeAway, after = after, noteChange = noteChange, bury = bury,
  }
end)()

-- remoteOf returns the replica state of a counter. Whoever changes it sets s.moved. A counter that does not exist has no
-- parts: any that are stored were left by a process without regions, which deleted the counter.
local function remoteOf(s)
  if not s.remote then
    s.remote = regions.read(redis.call('HGET', s.bucket.remotes, s.key), s.kind)
    if not s.kind and #s.remote.list > 0 then
      s.remote.list, s.remote.by, s.moved = {}, {}, true
    end
  end
  return s.remote
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
    if region and c.rule.kind ~= 'exact' then remoteOf(s) end -- before kind is set: remoteOf drops the parts of a missing counter
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

-- notify notes that a counter changed, for the publication.
local function notify(s)
  local t = to.updates[s.key]
  if not t then
    t = {places = {}, count = 0}
    to.updates[s.key] = t
    to.updated[#to.updated + 1] = s.key
  end
  return t
end

-- notifyMember notes that a member joined (true) or left (false).
local function notifyMember(t, name, is)
  if t.all then return end
  if t.places[name] == nil then t.count = t.count + 1 end
  t.places[name] = is
  if t.count > maxNamed then t.all = true end
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
  if after and region and kind == 'sum' then mine = minus(after, regions.elsewhere(remoteOf(s), kind)) end
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
--#include counter_gain.lua

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
    notify(s)
  end
end
-- others makes the functions for all verbs but additions. Lua creates a function object whenever it reaches a
-- definition, and that is most of the time of a short run; additions, the most frequent changes, should not pay for
-- these.
local function others()
--#include counter_set.lua
--#include counter_steps.lua
--#include counter_reshard.lua
--#include counter_edit.lua
--#include counter_reset.lua
  -- change makes one change that is not an addition, or returns the refusal.
  local function change(c)
    local s = states[c.key]
    local kind = s.kind or c.rule.kind
    if c.verb == 'reshard' then return reshard(s, c) end
    if sharded(s) then return refuse(s, c, 'sharded') end -- also before a refusal, which has the value
    if c.verb == 'edit' then return edit(s, c, kind) end
    if c.verb == 'reset' then return reset(s, c, kind) end
    return delete(s)
  end

  return change, function()
    for _, s in pairs(sets) do keepSet(s) end
  end
end

-- make makes an operation, or returns the refusal.
local change, keepSets
local waiting -- counters and idempotency keys of operations that a merge has to precede: later ones of these wait, too
local function waits(op) -- returns the change that waits
  for _, o in ipairs(waiting and op.changes or {}) do
    if waiting[o.key] or waiting[op.id or ''] then return o end
  end
end
local function make(op)
  local c = op.changes[1]
  local late = waits(op)
  if late then return refuse(states[late.key], late, 'sharded') end
  if c.verb == 'add' or c.verb == 'adjust' then return add(op.changes) end
  if c.verb == 'set' then
    local s = states[c.key]
    if sharded(s) then return refuse(s, c, 'sharded') end
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
-- PostgreSQL may know its idempotency key, stop: later operations must not overtake it. missing then has all keys that the
-- rest of the call lacks, so that one round trip loads them.
local results, ask, missing = {}, 0, {}
for i, op in ipairs(ops) do
  local repeated = replay(op) and not waits(op) -- its answer has the value
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
    if refusal and refusal[4] == 'sharded' then
      waiting = waiting or {}
      if op.id then waiting[op.id] = true end
      for _, c in ipairs(op.changes) do waiting[c.key] = true end
    end
    results[i] = refusal and table.concat(refusal, ' ') or ''
  end
end
-- Everything is judged; from here on the script writes.
--#include counter_write.lua
return {results, after, ask, missing}
