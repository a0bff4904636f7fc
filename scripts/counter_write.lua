-- counter_write.lua: write and publish what counter_apply.lua has judged. That script includes this file as its last part;
-- it does not run by itself.

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
  if s.kind and s.kind ~= 'exact' and is ~= was and remoteOf(s).heard then s.remote.heard, s.moved = false, true end
  if s.moved then
    local remote = regions.write(s.remote)
    if remote then redis.call('HSET', b.remotes, key, remote) else redis.call('HDEL', b.remotes, key) end
    if s.buried then regions.bury(b.counters, b.remotes, b.gone, key, s.remote.died, now) end
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
for _, key in ipairs(to.updated) do
  local t, s = to.updates[key], states[key]
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
