-- counter_updates.lua: what is published when counters of a bucket change. It is no script: it is included.
--
-- A publication is its sequence, and a line for each of three: key, state or "", and which members joined (+name) or left
-- (-name), with tabs between them; * when it would be too many, or all of them. feed.go reads it. Neither keys nor
-- members have control characters.

local function noteUpdate(list, key, state, all, places)
  local marks = all and '*' or ''
  if not all and places then
    local names = {}
    for name, is in pairs(places) do names[#names + 1] = (is and '+' or '-') .. name end
    marks = table.concat(names, '\t')
  end
  list[#list + 1] = '\n' .. key .. '\n' .. (state or '') .. '\n' .. marks
end

local function publishUpdates(command, channel, state, list)
  redis.call(command, channel, string.format('%.0f', redis.call('HINCRBY', state, 'told', 1)) .. table.concat(list))
end
