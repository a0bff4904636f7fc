-- levels.lua: read how far pages of one bucket have changed, and what of it one
-- user did.
--
-- KEYS     {b}:h:<page>  hashes, see change.lua
-- ARGV[1]  user
-- Returns  per page 'authored time incarnation changes', and, when the user is an
--          author, a space and 'changes last before'; empty: it never changed.
-- Changes nothing. O(pages).

local reply = {}
for k, key in ipairs(KEYS) do
  local v = redis.call('HGET', key, 'v') or ''
  if v ~= '' and string.sub(v, 1, 2) ~= '0 ' then
    local own = redis.call('HGET', key, 'o' .. ARGV[1])
    if own then v = v .. ' ' .. own end
  end
  reply[k] = v
end
return reply
