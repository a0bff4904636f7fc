-- publish.lua: the publications of a bucket. Other scripts include this file with
-- "--#include publish.lua"; it does not run by itself. feed.go reads the publications.
--
-- A publication is a line 'sequence stale again out'. The sequence grows by one, so a
-- reader that misses a publication sees the gap. stale 1: counts may lack users; again 1:
-- read the bucket again; out: the regions that counts leave out, a,b,c. Records follow. The
-- record of a count is binary, because it is the most frequent one:
--   c, the bytes of the page (2), the page, users (5), time of their last change (5),
--     incarnation (7) and sequence (6) of the version
-- The other records are a line, and then strings of the lengths in that line:
--   u <bytes of topic> <bytes of value> <incarnation> <version's sequence>, topic, value
--   + <bytes of topic> <bytes of gateway>, topic, gateway: an endpoint was attached
--   - <bytes of topic> <bytes of gateway>, topic, gateway: an endpoint was detached
-- A topic is 'kind/site/key'. The form of a value depends on the kind.

local function updateRecord(topic, incarnation, sequence, value)
  return string.format('u %d %d %s %d\n', #topic, #value, incarnation, sequence) .. topic .. value
end

-- countHead returns the beginning of the record of a count.
local countHeads = {}
local function countHead(bytes)
  if not countHeads[bytes] then countHeads[bytes] = 'c' .. struct.pack('>I2', bytes) end
  return countHeads[bytes]
end

-- countTail returns the end of the record of a count. The text of a page has the same bytes
-- from countFrom to countTo, see page.lua.
local countFrom, countTo = 5, 27
local function countTail(users, updated, incarnation, sequence)
  return struct.pack('>I5I5I7I6', users, updated, incarnation, sequence)
end

local function endpointRecord(sign, topic, gateway)
  return string.format('%s %d %d\n', sign, #topic, #gateway) .. topic .. gateway
end

-- attach adds the gateway to an endpoint set. If the endpoint is new, attach adds a record.
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
