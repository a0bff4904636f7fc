-- levels.lua: read how far pages of one bucket have changed, and what of it one
-- user did.
--
-- KEYS     {b}:h:<page>  hashes, see change.lua
-- ARGV[1]  user
-- Returns  per page 'incarnation changes authored time', a space, and, when the
--          user is an author, 'changes last before'; empty: it never changed.
-- Changes nothing. O(pages).

local reply = {}
for k, key in ipairs(KEYS) do
  local v = redis.call('HMGET', key, 'i', 'n', 'a', 't', 'o' .. ARGV[1])
  if v[1] then
    reply[k] = v[1] .. ' ' .. v[2] .. ' ' .. (v[3] or '0') .. ' ' .. v[4] .. ' ' .. (v[5] or '')
  else
    reply[k] = ''
  end
end
return reply
