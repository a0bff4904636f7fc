-- pairs.lua: how the users of other regions count. Other scripts include this file
-- with "--#include pairs.lua"; it does not run by itself.
--
-- peers of {b}:s, 'name flag floor since raised;' per peer. flag: 0 left out of totals,
--    1 in, 2 in, but what it has told is not complete yet; floor: pairs of a lower
--    incarnation are void; since and raised: unix seconds of the last change of flag
--    and floor
-- others of a page, 'name incarnation increments decrements;' per region

-- waitFor is how many seconds totals are stale for want of a peer's pairs after
-- a loss of data: a peer that can be reached has sent them by then.
local waitFor = 5

-- readPeers reads the field peers; waits says that totals lack users, out lists those left out.
local function readPeers(text, now)
  local peers, waits, out = {}, false, {}
  for name, flag, floor, since, raised in string.gmatch(text or '', '([%w_-]+) (%d) (%d+) (%d+) (%d+);') do
    since = tonumber(since)
    peers[name] = {flag = flag, floor = tonumber(floor), since = since, raised = tonumber(raised)}
    if flag == '2' and now - since < waitFor then waits = true end
    if flag == '0' then out[#out + 1] = name end
  end
  return peers, waits, table.concat(out, ',')
end

-- elsewhere is the number of a page's users in the other regions, the time of the
-- last change of the total when that of this region's part is updated, and whether a
-- region that is left out has users there.
local function elsewhere(others, peers, updated)
  local users, held = 0, false
  for name, inc, up, down in string.gmatch(others or '', '([%w_-]+) (%d+) (%d+) (%d+);') do
    local peer = peers[name]
    if peer and tonumber(up) > tonumber(down) then
      local at = peer.since
      if tonumber(inc) < peer.floor then
        at = peer.raised
      elseif peer.flag ~= '0' then
        users = users + up - down
      else
        held = true
      end
      if peer.flag ~= '2' and at > tonumber(updated) then updated = at end
    end
  end
  return users, updated, held
end

-- countValue is the value of a count's update, see presence.KindCount; out as
-- readPeers returns it.
local function countValue(users, updated, out)
  if out == '' then return string.format('%d %d', users, updated) end
  return string.format('%d %d %s', users, updated, out)
end
