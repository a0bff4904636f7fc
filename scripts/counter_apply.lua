-- counter_apply.lua: make operations on counters, in their order, each all or not at all.
--
-- KEYS     two of each bucket: hc:{n}:c, hc:{n}:s (see the README); in front of PostgreSQL four more: hc:{n}:d, :t, :j and
--          :a; with other regions three more: hc:{n}:f, :log and :gone. Then identities, named by their number. The keys of
--          one counter are made here, in the slot of its bucket; on a Cluster they are named, too, so that Redis refuses the
--          call before it begins when the slot is on its way and one of them is not here
-- ARGV     PUBLISH or SPUBLISH; how long an identity is remembered, ms; how many members one update names; how long a
--          ledger without a rule is kept, ms; how many values of a dimension are told apart; 1 in front of PostgreSQL;
--          this region, or "" when there are no others; of a bucket in front, the room for what is not persisted; 1: a
--          counter that does not exist is looked for elsewhere first; then
--          buckets: how many, and of each the number of its first key, and its channel;
--          rules: how many, and of each kind, floor or "", ceiling or "", how long its ledger is kept, ms, its match if it
--          has top lists, else "", and its steps: how many, and of each its length in s, and how long it is kept, ms;
--          operations, to the end: the number of the identity's key and of its bucket, or 0; 1: PostgreSQL does not know
--          the identity; how many changes; of each verb, key, number of bucket and rule, 1: it is nowhere else; then what
--          readers below say
-- Returns  "busy": a bucket is frozen. In front also "lost" and "full". Or results, one for each operation: "", "replay",
--          or why it is refused; the states of the counters after the call, in the order in which they are named first;
--          then, with fewer results, why the next operation cannot be made yet: 1: PostgreSQL has to be asked for its
--          identity; a list of counters that have to be looked for.
-- Safe to repeat and to arrive late: with an identity nothing is changed again. An operation without an identity is
-- the caller's to repeat or not. All is judged before the first write, but of registers. O(changes).
--#include counter_number.lua
--#include counter_front.lua
--#include counter_updates.lua

local command, remember, toldMost, keptDefault, values = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local inFront, region, room, looks = ARGV[6] == '1', ARGV[7], tonumber(ARGV[8]), ARGV[9] == '1'
if region == '' then region = nil end
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local nowText = string.format('%.0f', now)

-- What the call names, read once. states are by key, as nothing else has two of one key.
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

-- list reads how many there are, and then so many.
local function list()
  local all, n = {}, tonumber(ARGV[at])
  for i = 1, n do all[i] = ARGV[at + i] end
  at = at + 1 + n
  return all
end

-- Of a step of time number is the running one, and head how that begins in the slots of a sum.
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

-- keyOf is a key of a counter alone.
local function keyOf(s, name) return journalKey(s.bucket.counters, name, s.key) end

local function text(s)
  if not s.kind then return nil end
  return s.kind .. ' ' .. s.value .. ' ' .. s.at .. ' ' .. s.incarnation .. string.format(' %.0f %.0f', s.sequence, s.entries) .. s.slots .. s.mark
end

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

-- unknown are the counters of an operation that have to be looked for elsewhere first: in front those whose rows nobody
-- has read, else those that do not exist, which another rule may have made in another bucket.
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

-- What is to be written, when all is judged. Registers alone are written at once.
local to = {ledgers = {}, histories = {}, counts = {}, journals = {}, marks = {}, sharded = {}, ids = {}, told = {}, tellings = {}}

local regions = region and (function()
--#include counter_far.lua
  return {
    read = readFar, write = writeFar, elsewhere = elsewhere, takeAway = takeAway, after = after, noteChange = noteChange, bury = bury,
  }
end)()

-- farOf is what a counter has of other regions. Who changes it sets moved. A counter that is not there has no parts:
-- what stands there was left by a process without regions that deleted it.
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

local function refuse(s, c, why, detail)
  return {c.at, s.value, s.kind or c.rule.kind, why, detail or ''}
end

local function begin(s, c)
  if not s.kind then
    if region and c.rule.kind ~= 'exact' then farOf(s) end -- of a counter that is not there
    s.kind = c.rule.kind
    -- In front only this is newer than all that was lost.
    local least = inFront and s.bucket.front.life or now
    s.incarnation = string.format('%.0f', math.max(least, deleted(s.bucket) + 1))
  end
end

local function moved(s)
  local life = inFront and s.bucket.front.life
  if life and tonumber(s.incarnation) < life then s.incarnation = string.format('%.0f', life) end
  s.sequence, s.at = s.sequence + 1, nowText
end

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

-- tell notes that a counter changed. place: of a member whose place did.
local function tell(s)
  local t = to.told[s.key]
  if not t then
    t = {places = {}, count = 0}
    to.told[s.key] = t
    to.tellings[#to.tellings + 1] = s.key
  end
  return t
end

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

local function number(s, c)
  local kind = s.kind or c.rule.kind
  if kind ~= 'sum' and kind ~= 'exact' then return nil, refuse(s, c, 'kind', 'number') end
  if c.merged and kind ~= 'sum' then return nil, refuse(s, c, 'kind', 'merged') end
  local after = plus(s.value, c.delta)
  local mine = after -- this region's part is bounded like the total, whatever others take from that
  if after and region and kind == 'sum' then mine = minus(after, regions.elsewhere(farOf(s), kind)) end
  -- Shards may have what brings the value back into its bounds: so a sum is whole before it is refused for these.
  if sharded(s) and (not mine or math.max(#after, #mine) > SHORT + 1) then return nil, refuse(s, c, 'sharded') end
  if not mine then return nil, refuse(s, c, 'overflow') end
  if kind == 'exact' then
    local falls = string.sub(c.delta, 1, 1) == '-'
    if c.rule.floor ~= '' and falls and compare(after, c.rule.floor) < 0 then return nil, refuse(s, c, 'floor', c.rule.floor) end
    if c.rule.ceiling ~= '' and not falls and compare(after, c.rule.ceiling) > 0 then return nil, refuse(s, c, 'ceiling', c.rule.ceiling) end
  end
  return after
end

-- A step of time that is over goes to the history, in front to what is to be persisted.
local function history(key, s)
  local h = to.histories[key]
  if not h then
    h = {bucket = s.bucket}
    to.histories[key] = h
  end
  return h
end

local function within(value, delta) return plus(value, delta) or string.sub(delta, 1, 1) == '-' and LEAST or MOST end

-- turn gives s the slots of a rule when they are not those already: a step is over, or the rule has others now.
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
  for step, slot in pairs(was) do -- a rule of before has named it
    if #is < 4 then is[#is + 1] = ' ' .. step .. ':' .. string.format('%.0f', slot[1]) .. ':' .. slot[2] end
  end
  return table.concat(is)
end

-- gain adds to what a sum has gained in the running steps of time. marked: the change may move it in top lists, and nobody
-- has marked it yet.
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

-- count counts an addition to a sum under its dimensions.
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

local function copy(s)
  return {s.kind, s.value, s.at, s.incarnation, s.sequence, s.entries}
end

-- add makes a list of additions, or none of them.
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
      refusal[2] = s.value -- as it was before the operation
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
      s.value = c.after -- of the entry: the changes after it are in s already
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

-- What follows makes the verbs but additions. To create a function is what a short run spends most of its time on: so these
-- are created when the first change needs them.
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

  local sets = {}
  local function set(s, fresh)
    if fresh or not sets[s.key] then sets[s.key] = openSet(keyOf(s, 'm'), fresh) end
    return sets[s.key]
  end

  -- journal is what became of members since the last checkpoint; fresh: of those before none is left.
  local function journal(s, fresh)
    if not inFront then return {} end
    local key = keyOf(s, 'p')
    if fresh or not to.journals[key] then to.journals[key] = {bucket = s.bucket, fresh = fresh, places = {}} end
    return to.journals[key].places
  end

  -- keep is called before registers change.
  local function keep(s)
    if inFront and not s.kept and s.was and string.sub(s.was, 1, 7) == 'unique ' then keepRegisters(s.bucket.counters, s.bucket.taken, s.key) end
    s.kept = true
  end

  -- dropRegisters and observe write at once: it is certain by then that their operation is made.
  -- When Redis refuses writes it refuses the first one of a script.
  local function dropRegisters(s)
    keep(s)
    redis.call('UNLINK', keyOf(s, 'r'))
  end

  -- see adds members to those whom a unique has seen in the running steps of time. In front a step stays in
  -- Redis until it is persisted and over.
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
          local h = history(gained, s) -- written at the end, after what a delete of this call takes away
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

  -- observe adds members to registers, of which nobody can tell who is new.
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

  -- HISTORIES are the names of all that a sum may have.
  local HISTORIES = {'g1', 'g10', 'g60', 'g300', 'g900', 'g3600', 'g86400'}

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
      for _, name in ipairs(inFront and {'b'} or HISTORIES) do to.histories[keyOf(s, name)] = {bucket = b, drop = true} end -- whatever rules there were
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
      if size == 0 then set(s, true) end -- its parts go, too
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

-- From here on all is written.
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
    -- What is kept long enough goes when it is a quarter of what stays: so each is moved four times at most.
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
-- A field is name:value. Of the empty value it has what was counted under values that are not kept, and how many are.
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
  if region then redis.call('HINCRBY', b.state, 'shared', 1) end -- it is in the log
end
return {results, after, ask, missing}
