-- pairs.lua: the users of other regions. Other scripts include this file with
-- "--#include pairs.lua"; it does not run by itself.
--
-- The field peers of {b}:s has 'name flag floor since raised;' per peer. flag: 0 left out of
--    totals, 1 included, 2 included but not complete yet; floor: pairs of a lower incarnation
--    are void; since and raised: unix seconds of the last change of flag and floor.
-- A page has 'name incarnation increments decrements;' per other region.

-- waitFor is how many seconds after a loss of data totals stay stale because a peer's
-- pairs are missing. A peer that can be reached sends its pairs in this time.
local waitFor = 5

-- readPeers reads the field peers. waits is true if totals lack users; out lists the peers that are left out.
local function readPeers(text, now)
  local peers, waits, out = {}, false, {}
  for name, flag, floor, since, raised in string.gmatch(text or '', '([%w_-]+) (%d) (%d+) (%d+) (%d+);') do
    since = tonumber(since)
    peers[name] = {flag = flag, floor = tonumber(floor), since = since, raised = tonumber(raised)}
    -- since is far ahead of now where the clock has gone back.
    if flag == '2' and math.abs(now - since) < waitFor then waits = true end
    if flag == '0' then out[#out + 1] = name end
  end
  return peers, waits, table.concat(out, ',')
end

-- elsewhere returns the number of a page's users in the other regions, the time of the
-- last change of the total (updated is the time of the last change in this region), and
-- whether a region that is left out has users on the page.
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

-- countValue returns the value of a count's update, see presence.KindCount. readPeers
-- returns out.
local function countValue(users, updated, out)
  if out == '' then return string.format('%d %d', users, updated) end
  return string.format('%d %d %s', users, updated, out)
end
