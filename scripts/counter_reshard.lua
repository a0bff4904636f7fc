-- counter_reshard.lua: the record of a sharded sum. counter_apply.lua includes this file; it does not run by itself.

-- reshard makes a step of a sharded sum; one that is late or repeated changes nothing.
local function reshard(s, c)
  local epoch = string.match(s.mark, '^ %*([^:]+):')
  if c.step == 'split' then
    if s.kind ~= 'sum' or sharded(s) or #s.value > SHORT then return nil end
    if region and #(minus(s.value, regions.elsewhere(remoteOf(s), 'sum')) or MOST) > SHORT then return nil end
    local incarnation, last = string.match(epoch or '', '^(%d+)%.(%d+)$')
    s.mark = ' *' .. s.incarnation .. '.' .. string.format('%.0f', incarnation == s.incarnation and last + 1 or 1) .. ':s'
    to.sharded[s.key] = true
    return nil
  end
  if c.step == 'merge' and not sharded(s) then to.sharded[s.key] = false end
  if not sharded(s) or epoch ~= c.epoch then return nil end
  local has, delta, moves, is = {}, '0', 0, {}
  for value, sequence in string.gmatch(s.mark, '(%-?%d+)/(%d+)') do has[#has + 1] = {value, tonumber(sequence)} end
  for i = 1, #c.shards / 2 do
    local was, p = has[i] or {'0', 0}, {c.shards[2 * i - 1], tonumber(c.shards[2 * i])}
    if p[2] > was[2] then
      delta, moves = plus(plus(delta, p[1]), opposite(was[1])), moves + p[2] - was[2]
      was = p
    end
    is[i] = was[1] .. '/' .. string.format('%.0f', was[2])
  end
  if moves > 0 then
    s.mark = ' *' .. epoch .. ':s:' .. table.concat(is, ',')
    s.value, s.sequence = plus(s.value, delta), s.sequence + moves
    s.at = string.format('%.0f', math.max(tonumber(s.at), c.time))
    gain(s, c.rule, delta, string.sub(delta, 1, 1) ~= '-')
    notify(s)
  end
  if c.step == 'merge' then
    s.mark, to.sharded[s.key] = ' *' .. epoch .. ':f', false
    if s.sequence == 0 then -- it was deleted elsewhere, and its shards had nothing more
      s.kind, s.value, s.at, s.incarnation, s.mark = nil, '0', nil, nil, ''
    end
  end
end
