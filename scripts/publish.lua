-- publish.lua: how a bucket publishes what changed. Other scripts include this file
-- with "--#include publish.lua"; it does not run by itself. feed.go reads the
-- publications.
--
-- A publication is a line 'sequence stale again out'. The sequence grows by one, so a
-- reader that misses a publication sees the gap. stale 1: the updates may lack
-- something; again 1: read the bucket again; out: the regions that counts leave out, a,b,c.
-- Then come records. The one of a count is short to make and to read:
--   c, the bytes of the page (2), the page, users (5), time of their last change (5),
--     incarnation (7) and sequence (6) of the version
-- The others are a line and the bytes whose numbers it gives:
--   u <bytes of topic> <bytes of value> <incarnation> <version's sequence>, topic, value
--   + <bytes of topic> <bytes of gateway>, topic, gateway: an endpoint has come
--   - <bytes of topic> <bytes of gateway>, topic, gateway: it has gone
-- A topic is 'kind/site/key'. Only the kind can read its value.

local function updateRecord(topic, incarnation, sequence, value)
  return string.format('u %d %d %s %d\n', #topic, #value, incarnation, sequence) .. topic .. value
end

-- countHead returns what the record of a count begins with.
local countHeads = {}
local function countHead(bytes)
  if not countHeads[bytes] then countHeads[bytes] = 'c' .. struct.pack('>I2', bytes) end
  return countHeads[bytes]
end

-- countTail returns what the record of a count ends with. The text of a page has the same
-- from countFrom to countTo, see page.lua.
local countFrom, countTo = 5, 27
local function countTail(users, updated, incarnation, sequence)
  return struct.pack('>I5I5I7I6', users, updated, incarnation, sequence)
end

local function endpointRecord(sign, topic, gateway)
  return string.format('%s %d %d\n', sign, #topic, #gateway) .. topic .. gateway
end

-- attach adds the gateway to an endpoint set. If it was not there, attach adds a record.
local function attach(endpoints, gateway, topic, records)
  if redis.call('SADD', endpoints, gateway .. '\0' .. topic) == 1 then
    records[#records + 1] = endpointRecord('+', topic, gateway)
  end
end

-- publish sends records. state is the bucket's hash, see README.md; command is
-- PUBLISH or SPUBLISH.
local function publish(state, channel, command, stale, again, out, records)
  local sequence = redis.call('HINCRBY', state, 'publications', 1)
  local head = string.format('%.0f %d %d %s\n', sequence, stale and 1 or 0, again and 1 or 0, out)
  redis.call(command, channel, head .. table.concat(records))
end
