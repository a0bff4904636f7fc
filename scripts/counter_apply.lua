-- counter_apply.lua: make operations on counters, in their order, each all or not at all.
--
-- KEYS     two of each bucket: hc:{n}:c, hc:{n}:s (see the README); then ledgers, sets and identities, named by their
--          number
-- ARGV[1]  PUBLISH or SPUBLISH
-- ARGV[2]  the operations, JSON; see apply.go. front: PostgreSQL stands behind Redis, and a bucket
--          has six keys: the two, hc:{n}:d, :t, :j and :a. region: there are other regions, and behind
--          those keys a bucket has three more: hc:{n}:f, :log and :gone
-- ARGV[3]  how long an identity is remembered, ms
-- Returns  JSON: {"busy":true} when a bucket is frozen; or results, one for each operation, and the states of the
--          counters after the call. With fewer results stop says why the next operation cannot be made yet. In front
--          also {"lost":true} and {"full":true}.
-- Safe to repeat and to arrive late: with an identity nothing is changed again. An operation without an identity is
-- the caller's to repeat or not. All is judged before the first write, but of registers. O(changes).
--#include counter_number.lua
--#include counter_far.lua
--#include counter_set.lua
--#include counter_front.lua
--#include counter_steps.lua

local command, call, remember = ARGV[1], cjson.decode(ARGV[2]), ARGV[3]
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

-- What the call names, read once. states are by key, as nothing else has two of one key.
local buckets, states, order = call.buckets, {}, {}
for _, b in ipairs(buckets) do
  b.counters, b.state = KEYS[b.at], KEYS[b.at + 1]
  b.keys = {}
  if call.front then
    b.dirty, b.taken, b.journal, b.ages = KEYS[b.at + 2], KEYS[b.at + 3], KEYS[b.at + 4], KEYS[b.at + 5]
    b.front = front(b.state)
    if not b.front then return cjson.encode({lost = true}) end
  end
  if call.region then
    local at = b.at + (call.front and 6 or 2)
    b.fars, b.log, b.gone = KEYS[at], KEYS[at + 1], KEYS[at + 2]
  end
end
for _, op in ipairs(call.ops) do
  for _, c in ipairs(op.changes) do
    if not states[c.key] then
      local b = buckets[c.bucket]
      states[c.key] = {key = c.key, bucket = b}
      order[#order + 1] = c.key
      b.keys[#b.keys + 1] = c.key
    end
  end
end

local function text(s)
  return s.kind and table.concat({s.kind, s.value, s.at, s.incarnation, string.format('%.0f', s.sequence), string.format('%.0f', s.entries)}, ' ') .. s.slots .. s.mark
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
          s.cold = call.front
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

local function answer(results, stop)
  local after = {}
  for _, key in ipairs(order) do after[key] = text(states[key]) or '' end
  return cjson.encode({results = results, states = after, stop = stop})
end

for _, b in ipairs(buckets) do
  local frozen = redis.call('HGET', b.state, 'until')
  if frozen and now < tonumber(frozen) then return cjson.encode({busy = true}) end
  if call.front and redis.call('HLEN', b.dirty) + redis.call('LLEN', b.journal) + b.front.pending > call.room then
    return cjson.encode({full = true})
  end
end
load()

-- unknown are the counters of an operation that have to be looked for elsewhere first: in front those whose rows nobody
-- has read, else those that do not exist, which another rule may have made in another bucket.
local function unknown(op)
  local keys
  for _, c in ipairs(op.changes) do
    local s = states[c.key]
    if call.front and s.cold or call.looks and not s.was and not c.looked then
      keys = keys or {}
      keys[#keys + 1] = c.key
    end
  end
  return keys
end

-- What is to be written, when all is judged. Registers alone are written at once.
local ledgers, sets, ids, told, tellings = {}, {}, {}, {}, {}

-- farOf is what a counter has of other regions. Who changes it sets moved. A counter that is not there has no parts:
-- what stands there was left by a process without regions that deleted it.
local function farOf(s)
  if not s.far then
    s.far = readFar(redis.call('HGET', s.bucket.fars, s.key), s.kind)
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
  return {refused = why, at = c.at, value = s.value, kind = s.kind or c.kind, detail = detail}
end

local function begin(s, c)
  if not s.kind then
    if call.region and c.kind ~= 'exact' then farOf(s) end -- of a counter that is not there
    s.kind = c.kind
    -- In front only this is newer than all that was lost.
    local least = call.front and s.bucket.front.life or now
    s.incarnation = string.format('%.0f', math.max(least, deleted(s.bucket) + 1))
  end
end

local function moved(s)
  local life = call.front and s.bucket.front.life
  if life and tonumber(s.incarnation) < life then s.incarnation = string.format('%.0f', life) end
  s.sequence, s.at = s.sequence + 1, string.format('%.0f', now)
end

local function enter(s, c, name, delta)
  s.entries = s.entries + 1
  local l = ledgers[c.ledger]
  if not l then
    l = {}
    ledgers[c.ledger] = l
  end
  l.bucket = s.bucket
  l.kept = s.kind == 'exact' and c.kind == 'exact' and (c.kept or 0) or call.kept
  l[#l + 1] = {string.format('%.0f', s.entries) .. '-' .. s.at, 'op', name, 'delta', delta, 'after', s.value, 'reason', c.reason or '', 'by', c.by or ''}
end

-- tell notes that a counter changed. place: of a member whose place did.
local function tell(s)
  local t = told[s.key]
  if not t then
    t = {places = {}, count = 0}
    told[s.key] = t
    tellings[#tellings + 1] = s.key
  end
  return t
end

local function tellMember(t, name, is)
  if t.all then return end
  if t.places[name] == nil then t.count = t.count + 1 end
  t.places[name] = is
  if t.count > call.told then t.all = true end
end

-- A hot sum has a mark behind its slots, ' *epoch:phase:value/sequence,…', what of each of its parts is in it
-- already; package hot has the way. Numbers are kept short meanwhile, so that gathering never overflows.
local SHORT = 17
local function spread(s) return s.mark ~= '' and string.sub(s.mark, -2) ~= ':f' end

local function number(s, c)
  local kind = s.kind or c.kind
  if kind ~= 'sum' and kind ~= 'exact' then return nil, refuse(s, c, 'kind', 'number') end
  if c.merged and kind ~= 'sum' then return nil, refuse(s, c, 'kind', 'merged') end
  local after = plus(s.value, c.delta)
  local own = after -- this region's part is bounded like the total, whatever others take from that
  if after and call.region and kind == 'sum' then own = minus(after, elsewhere(farOf(s), kind)) end
  -- Parts may have what brings the value back into its bounds: so a sum is whole before it is refused for these.
  if spread(s) and (not own or math.max(#after, #own) > SHORT + 1) then return nil, refuse(s, c, 'spread') end
  if not own then return nil, refuse(s, c, 'overflow') end
  if kind == 'exact' then
    local falls = string.sub(c.delta, 1, 1) == '-'
    if c.floor and falls and compare(after, c.floor) < 0 then return nil, refuse(s, c, 'floor', c.floor) end
    if c.ceiling and not falls and compare(after, c.ceiling) > 0 then return nil, refuse(s, c, 'ceiling', c.ceiling) end
  end
  return after
end

-- gain adds to what a sum has gained in the steps of time that are running, as State.Gain does. A
-- step that is over goes to the history, in front to what is to be persisted.
local histories = {}
local function history(key, s)
  local h = histories[key]
  if not h then
    h = {bucket = s.bucket}
    histories[key] = h
  end
  return h
end

local marks = {}
local function gain(s, c)
  if not c.buckets or s.kind ~= 'sum' or c.verb ~= 'add' then return end
  local was, is = {}, {}
  for step, number, value in string.gmatch(s.slots, ' (%d+):(%d+):(%S+)') do was[step] = {tonumber(number), value} end
  for i, b in ipairs(c.buckets) do
    local step, number = tostring(b.step), math.floor(now / 1000 / b.step)
    local slot = was[step]
    was[step] = nil
    if slot and slot[1] >= number then
      slot[2] = plus(slot[2], c.delta) or string.sub(slot[2], 1, 1) == '-' and LEAST or MOST
    else
      if slot then
        local h = history(call.front and journalKey(s.bucket.counters, 'b', s.key) or KEYS[b.past], s)
        h.step, h.kept = b.step, b.kept
        h[#h + 1] = {step .. ':' .. string.format('%.0f', slot[1]), string.format('%.0f', slot[1]), slot[2], string.format('%.0f', b.kept)}
      end
      slot = {number, c.delta}
    end
    is[i] = ' ' .. step .. ':' .. string.format('%.0f', slot[1]) .. ':' .. slot[2]
    if i == 1 and c.top then marks[#marks + 1] = {KEYS[c.top], string.format('%.0f', slot[1]) .. ':' .. s.key} end
  end
  for step, slot in pairs(was) do -- a rule of before has named it
    if #is < 4 then is[#is + 1] = ' ' .. step .. ':' .. string.format('%.0f', slot[1]) .. ':' .. slot[2] end
  end
  s.slots = table.concat(is)
end

-- divide makes a step of a hot sum to its parts or back; one that is late or repeated changes nothing.
local hot = {}
local function divide(s, c)
  local epoch, phase, text = string.match(s.mark, '^ %*([^:]+):(%a):?(.*)$')
  if c.step == 'open' then
    if s.kind ~= 'sum' or spread(s) or #s.value > SHORT then return nil end
    if call.region and #(minus(s.value, elsewhere(farOf(s), 'sum')) or MOST) > SHORT then return nil end
    local incarnation, last = string.match(epoch or '', '^(%d+)%.(%d+)$')
    s.mark = ' *' .. s.incarnation .. '.' .. string.format('%.0f', incarnation == s.incarnation and last + 1 or 1) .. ':o'
    hot[c.hot] = {s.key, true}
    return nil
  end
  if c.step == 'forget' and not spread(s) then
    hot[c.hot] = {s.key, false}
    if s.kind and s.sequence == 0 then -- it was deleted elsewhere, and its parts had nothing more
      s.kind, s.value, s.at, s.incarnation, s.mark = nil, '0', nil, nil, ''
      return nil
    end
  end
  if epoch ~= c.epoch then return nil end
  local head = ' *' .. epoch .. ':'
  if c.step == 'spread' and phase == 'o' then
    s.mark = head .. 's'
  elseif c.step == 'close' and (phase == 'o' or phase == 's') then
    s.mark = head .. 'c' .. (text ~= '' and ':' .. text or '')
  elseif phase == 'c' and (c.step == 'gather' or c.step == 'fold') or phase == 's' and c.step == 'gather' then
    local has, delta, moves, is = {}, '0', 0, {}
    for value, sequence in string.gmatch(text, '(%-?%d+)/(%d+)') do has[#has + 1] = {value, tonumber(sequence)} end
    for i, p in ipairs(c.parts) do
      local was = has[i] or {'0', 0}
      if p[2] > was[2] then
        delta, moves = plus(plus(delta, p[1]), opposite(was[1])), moves + p[2] - was[2]
        was = p
      end
      is[i] = was[1] .. '/' .. string.format('%.0f', was[2])
    end
    s.mark = c.step == 'fold' and head .. 'f' or head .. phase .. ':' .. table.concat(is, ',')
    if moves > 0 then
      s.value, s.sequence = plus(s.value, delta), s.sequence + moves
      s.at = string.format('%.0f', math.max(tonumber(s.at), c.time or 0))
      gain(s, {verb = 'add', delta = delta, buckets = c.buckets, past = c.past, top = string.sub(delta, 1, 1) ~= '-' and c.top or nil})
      tell(s)
    end
  end
end

-- count counts an addition to a sum under its dimensions.
local counts = {}
local function count(s, c)
  if not c.dimensions or s.kind ~= 'sum' then return end
  local list = counts[c.counted]
  if not list then
    list = {bucket = s.bucket}
    counts[c.counted] = list
  end
  for _, d in ipairs(c.dimensions) do list[#list + 1] = {d[1], d[2], c.delta} end
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
      refusal.value = s.value -- as it was before the operation
      return refusal
    end
    before[i] = copy(s)
    begin(s, c)
    s.value = after
    moved(s)
    c.after = after
  end
  for _, c in ipairs(changes) do
    local s = states[c.key]
    if c.verb == 'adjust' or s.kind == 'exact' then
      local last = s.value
      s.value = c.after -- of the entry: the changes after it are in s already
      enter(s, c, c.verb == 'adjust' and 'adjust' or string.sub(c.delta, 1, 1) == '-' and 'decrement' or 'increment', c.delta)
      s.value = last
    end
    gain(s, c)
    count(s, c)
    tell(s)
  end
end

local function set(c, fresh)
  if fresh or not sets[c.set] then sets[c.set] = openSet(KEYS[c.set], fresh) end
  return sets[c.set]
end

-- journal is what became of members since the last checkpoint; fresh: of those before none is left.
local journals = {}
local function journal(s, c, fresh)
  if not call.front then return {} end
  local key = journalKey(s.bucket.counters, 'p', s.key)
  if fresh or not journals[key] then journals[key] = {bucket = s.bucket, fresh = fresh, places = {}} end
  return journals[key].places
end

-- dropRegisters and observe write at once: it is certain by then that their operation is made.
-- When Redis refuses writes it refuses the first one of a script.
local function dropRegisters(c) redis.call('UNLINK', KEYS[c.registers]) end

-- see adds members to those whom a unique has seen in the running steps of time. In front a step stays in
-- Redis until it is persisted and over.
local function see(s, c, names)
  if not c.buckets then return end
  local list, b = KEYS[c.steps], s.bucket
  for _, bucket in ipairs(c.buckets) do
    local name = tostring(bucket.step) .. ':' .. string.format('%.0f', math.floor(now / 1000 / bucket.step))
    local registers = stepKey(list, name)
    if redis.call('PFADD', registers, unpack(names)) == 1 then
      local keeps = bucket.kept + 3000 * bucket.step
      local fresh = redis.call('ZADD', list, string.format('%.0f', now + keeps), name) == 1
      if call.front then
        s.saw = true
        local gained = journalKey(b.counters, 'b', s.key)
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
        for _, old in ipairs(redis.call('ZRANGEBYSCORE', list, '-inf', call.front and '+inf' or string.format('%.0f', now))) do
          local step, number = string.match(old, '^(%d+):(%d+)$')
          if not call.front or (number + 1) * step * 1000 <= now
            and redis.call('HEXISTS', journalKey(b.counters, 'b', s.key), old) + redis.call('HEXISTS', journalKey(b.counters, 'bt', s.key), old) == 0 then
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
  if c.leave then return refuse(s, c, 'kind', 'unique') end
  local names = {}
  for i, m in ipairs(c.join) do names[i] = string.sub(m, WIDTH + 1) end
  if redis.call('PFADD', KEYS[c.registers], unpack(names)) == 1 then
    begin(s, c)
    s.value = string.format('%.0f', redis.call('PFCOUNT', KEYS[c.registers]))
    moved(s)
    tell(s)
  end
  see(s, c, names)
end

local function make(op)
  local c = op.changes[1]
  if c.verb == 'add' or c.verb == 'adjust' then return add(op.changes) end
  local s = states[c.key]
  local kind = s.kind or c.kind
  if c.verb == 'divide' then return divide(s, c) end
  if (c.verb == 'reset' or c.verb == 'delete') and spread(s) then return refuse(s, c, 'spread') end
  if c.verb == 'reset' then
    if s.value == '0' then return nil end
    local delta, own = opposite(s.value), '0'
    if call.region and kind == 'sum' then own = minus(s.value, elsewhere(farOf(s), kind)) end
    if not delta or not own or not opposite(own) then return refuse(s, c, 'overflow', 'opposite') end
    local t = tell(s)
    if kind == 'members' then
      set(c, true)
      journal(s, c, true)
      t.all = true
    elseif kind == 'unique' then
      dropRegisters(c)
    end
    if call.region and kind ~= 'exact' then
      local far = farOf(s)
      if kind == 'sum' then
        takeAway(far, call.region, tonumber(s.incarnation), s.sequence, own)
      else
        s.far = {died = far.died, emptied = after(far, now, far.emptied, tonumber(s.incarnation)), list = {}, by = {}}
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
      set(c, true)
      journal(s, c, true)
    elseif s.kind == 'unique' then
      dropRegisters(c)
      dropSteps(KEYS[c.steps])
    end
    if call.region and s.kind ~= 'exact' then
      local far = farOf(s)
      s.far, s.moved, s.buried = {died = after(far, now, far.died, tonumber(s.incarnation)), emptied = 0, list = {}, by = {}}, true, true
      b.deleted = math.max(b.deleted, s.far.died)
    end
    s.dropped = true
    ledgers[c.ledger] = {drop = true}
    if call.front then histories[journalKey(b.counters, 'b', s.key)] = {bucket = b, drop = true} end
    for _, at in ipairs(c.past or {}) do histories[KEYS[at]] = {bucket = b, drop = true} end
    counts[c.counted] = {bucket = b, drop = true}
    s.kind, s.value, s.at, s.incarnation, s.sequence, s.entries, s.slots, s.mark = nil, '0', nil, nil, 0, 0, '', ''
    tell(s).all = true
  else
    if kind == 'unique' then return observe(s, c) end
    if kind ~= 'members' then return refuse(s, c, 'kind', 'members') end
    local others = call.region and elsewhere(farOf(s), kind) or '0'
    local members, size, changed = set(c), tonumber(minus(s.value, others)), {}
    for _, m in ipairs(c.join or {}) do
      if join(members, string.sub(m, 1, WIDTH), size) then
        size = size + 1
        changed[#changed + 1] = {string.sub(m, WIDTH + 1), true}
      end
    end
    for _, m in ipairs(c.leave or {}) do
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
    if size == 0 then set(c, true) end -- its parts go, too
    local t, places = tell(s), journal(s, c)
    for _, m in ipairs(changed) do
      tellMember(t, m[1], m[2])
      places[m[1]] = m[2] and '1' or '0'
    end
  end
end

local function replay(op)
  local id = op.id and KEYS[op.id]
  return id and (ids[id] or redis.call('EXISTS', id) == 1)
end

local results, stop = {}, nil
for i, op in ipairs(call.ops) do
  local id = op.id and KEYS[op.id]
  local repeated = replay(op)
  local missing = not repeated and unknown(op)
  if repeated then
    results[i] = {replay = true}
  elseif missing or id and call.front and not op.asked and now < buckets[op.idbucket].front.asks then
    stop = {ask = not missing, unknown = {}}
    for j = i, #call.ops do
      if not replay(call.ops[j]) then
        for _, key in ipairs(unknown(call.ops[j]) or {}) do stop.unknown[#stop.unknown + 1] = key end
      end
    end
    break
  else
    results[i] = make(op) or {}
    if id and not results[i].refused then ids[id] = op.idbucket or true end
  end
end

-- From here on all is written.
for _, key in ipairs(order) do
  local s = states[key]
  local is = text(s)
  if call.front then
    is = is or '-'
    if not s.cold and (is ~= s.was or s.dropped or s.saw) then
      local b = s.bucket
      fix(b.counters, b.taken, key, s.was)
      redis.call('HSET', b.counters, key, is)
      if s.dropped then redis.call('HSET', b.dirty, key, 'x') else redis.call('HSETNX', b.dirty, key, '') end
      redis.call('HSETNX', b.state, 'since', string.format('%.0f', now))
      redis.call('ZADD', b.ages, is == '-' and 1 or now, key)
    end
  elseif is and is ~= s.was then
    redis.call('HSET', s.bucket.counters, key, is)
  elseif s.was and not is then
    redis.call('HDEL', s.bucket.counters, key)
  end
end
for _, key in ipairs(call.region and order or {}) do
  local s = states[key]
  local b, is, was = s.bucket, text(s), s.was or nil
  if s.kind and s.kind ~= 'exact' and is ~= was and farOf(s).heard then s.far.heard, s.moved = false, true end
  if s.moved then
    local far = writeFar(s.far)
    if far then redis.call('HSET', b.fars, key, far) else redis.call('HDEL', b.fars, key) end
    if s.buried then bury(b.counters, b.fars, b.gone, key, s.far.died, now) end
  end
  if s.moved or is ~= was and s.kind ~= 'exact' then noteChange(b.state, b.log, key) end
end
for at, h in pairs(hot) do
  if h[2] then redis.call('HSET', KEYS[at], h[1], '') else redis.call('HDEL', KEYS[at], h[1]) end
end
for at, l in pairs(ledgers) do
  local ledger = KEYS[at]
  if l.drop then redis.call('UNLINK', ledger) end
  for _, e in ipairs(l) do redis.call('XADD', ledger, unpack(e)) end
  if call.front and #l > 0 then redis.call('HINCRBY', l.bucket.state, 'pending', #l) end
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
for key, h in pairs(histories) do
  if h.drop then redis.call('UNLINK', key) end
  if #h > 0 and call.front then
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
local function add64(a, b) return plus(a, b) or string.sub(b, 1, 1) == '-' and LEAST or MOST end
for at, list in pairs(counts) do
  local key = KEYS[at]
  if list.drop then redis.call('UNLINK', key) end
  for _, d in ipairs(list) do
    local all, delta = d[1] .. ':', d[3]
    local field = all .. d[2]
    local is = redis.call('HGET', key, field)
    if is then
      redis.call('HSET', key, field, add64(is, delta))
    else
      local other, kept = string.match(redis.call('HGET', key, all) or '0 0', '^(%S+) (%d+)$')
      if tonumber(kept) < call.values then
        redis.call('HSET', key, field, delta, all, other .. ' ' .. string.format('%.0f', kept + 1))
        if call.front then redis.call('HINCRBY', list.bucket.state, 'pending', 1) end
      else
        redis.call('HSET', key, all, add64(other, delta) .. ' ' .. kept)
      end
    end
  end
end
for _, m in ipairs(marks) do redis.call('SADD', m[1], m[2]) end
for _, s in pairs(sets) do keepSet(s) end
for id, bucket in pairs(ids) do
  redis.call('SET', id, '', 'PX', remember)
  if call.front then redis.call('RPUSH', buckets[bucket].journal, string.match(id, ':i:(.+)$')) end
end
for key, j in pairs(journals) do
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
-- A line for each bucket: 'sequence [updates]', which feed.go reads.
local news = {}
for _, key in ipairs(tellings) do
  local t, s = told[key], states[key]
  local update = {key = key, state = text(s) or '', all = t.all}
  if not t.all and t.count > 0 then
    local joined, left = {}, {}
    for name, is in pairs(t.places) do
      if is then joined[#joined + 1] = name else left[#left + 1] = name end
    end
    if #joined > 0 then update.joined = joined end
    if #left > 0 then update.left = left end
  end
  local list = news[s.bucket]
  if not list then
    list = {}
    news[s.bucket] = list
  end
  list[#list + 1] = update
end
for b, updates in pairs(news) do
  redis.call(command, b.channel, string.format('%.0f ', redis.call('HINCRBY', b.state, 'told', 1)) .. cjson.encode(updates))
  if call.region then redis.call('HINCRBY', b.state, 'shared', 1) end -- it is in the log
end
return answer(results, stop)
