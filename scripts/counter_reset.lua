-- counter_reset.lua: reset and delete counters. counter_apply.lua includes this file after counter_edit.lua; it does not run
-- by itself.

-- reset makes a counter 0. Its history and its ledger stay.
local function reset(s, c, kind)
  if s.value == '0' then return nil end
  local delta, own = opposite(s.value), '0'
  if region and kind == 'sum' then own = minus(s.value, regions.elsewhere(remoteOf(s), kind)) end
  if not delta or not own or not opposite(own) then return refuse(s, c, 'overflow', 'opposite') end
  local t = notify(s)
  if kind == 'members' then
    set(s, true)
    journal(s, true)
    t.all = true
  elseif kind == 'unique' then
    dropRegisters(s)
  end
  if region and kind ~= 'exact' then
    local remote = remoteOf(s)
    if kind == 'sum' then
      regions.takeAway(remote, region, tonumber(s.incarnation), s.sequence, own)
    else
      s.remote = {died = remote.died, emptied = regions.after(remote, now, remote.emptied, tonumber(s.incarnation)), list = {}, by = {}}
    end
    s.moved = true
  end
  s.value = '0'
  moved(s)
  enter(s, c, 'reset', delta)
end

-- HISTORIES has the prefixes of all histories that a sum may have, one for each length of counter.BucketSteps.
local HISTORIES = {'g1', 'g10', 'g60', 'g300', 'g900', 'g3600', 'g86400'}

-- delete deletes a counter with everything that belongs to it.
local function delete(s)
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
    local remote = remoteOf(s)
    s.remote, s.moved, s.buried = {died = regions.after(remote, now, remote.died, tonumber(s.incarnation)), emptied = 0, list = {}, by = {}}, true, true
    b.deleted = math.max(b.deleted, s.remote.died)
  end
  s.dropped = true
  to.ledgers[keyOf(s, 'l')] = {drop = true}
  for _, name in ipairs(inFront and {'b'} or HISTORIES) do to.histories[keyOf(s, name)] = {bucket = b, drop = true} end -- whichever lengths former rules had
  to.counts[keyOf(s, 'e')] = {bucket = b, drop = true}
  s.kind, s.value, s.at, s.incarnation, s.sequence, s.entries, s.slots, s.mark = nil, '0', nil, nil, 0, 0, '', ''
  notify(s).all = true
end
