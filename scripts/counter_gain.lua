-- counter_gain.lua: what a sum gains in time buckets and under values of dimensions. counter_apply.lua includes this file;
-- it does not run by itself, and counter_write.lua writes what it collects.

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
