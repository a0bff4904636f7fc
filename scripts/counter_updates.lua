-- counter_updates.lua: publications of changed counters. Other scripts include this file; it does not run by itself.
--
-- A publication has the bucket's sequence, and for each counter three lines: key, state or "", and the members that
-- joined (+name) or left (-name), separated by tabs, or * if they are too many or unknown. counterredis/feed.go
-- parses it. Neither keys nor members contain control characters. A gap in the sequence makes a feed read again.

-- noteUpdate adds a counter to a publication.
local function noteUpdate(list, key, state, all, places)
  local marks = all and '*' or ''
  if not all and places then
    local names = {}
    for name, is in pairs(places) do names[#names + 1] = (is and '+' or '-') .. name end
    marks = table.concat(names, '\t')
  end
  list[#list + 1] = '\n' .. key .. '\n' .. (state or '') .. '\n' .. marks
end

-- publishUpdates publishes them, with the next sequence.
local function publishUpdates(command, channel, state, list)
  redis.call(command, channel, string.format('%.0f', redis.call('HINCRBY', state, 'told', 1)) .. table.concat(list))
end
