-- counter_edit.lua: changes of members and registers. counter_apply.lua includes this file; it does not run by itself.

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
    notify(s)
  end
  see(s, c, names)
end

-- edit adds members to a set or unique, or removes members of a set. It returns the refusal, if any.
local function edit(s, c, kind)
  if kind == 'unique' then return observe(s, c) end
  if kind ~= 'members' then return refuse(s, c, 'kind', 'members') end
  local others = region and regions.elsewhere(remoteOf(s), kind) or '0'
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
  local t, places = notify(s), journal(s)
  for _, m in ipairs(changed) do
    notifyMember(t, m[1], m[2])
    places[m[1]] = m[2] and '1' or '0'
  end
end
