-- sweep.lua: let pages without users in one bucket expire, or forget them at once.
--
-- KEYS[1]  {b}:s  hash, see README.md   KEYS[2]  {b}:z  zset: pages without users
-- KEYS[3…] {b}:c:<page>  strings, see page.lua
-- ARGV[1]  length of the prefix of the pages' keys   ARGV[2]  how many seconds a page
--          without users is remembered   ARGV[3]  1: forget the pages without users
-- ARGV[4]  number of the sweep that ends with this call, or empty
-- Returns  {number of the last requested sweep, number of the last sweep that ended}.
-- Normally the script that removes a page's last user lets the page expire. But a loss of
-- data, or the removal of a peer, may leave empty pages that no script changes any more. A
-- sweep then checks all pages. A forgotten page that is used again gets a version and a pair
-- above all its former ones. Safe to repeat. O(pages).
--#include pairs.lua
--#include page.lua

local state = redis.call('HMGET', KEYS[1], 'rebuild', 'peers', 'past', 'sweep', 'swept')
local rebuild, past = tonumber(state[1] or 0), tonumber(state[3] or 0)
local second, prefix = tonumber(redis.call('TIME')[1]), tonumber(ARGV[1])
local peers = readPeers(state[2], second)
redis.call('ZCARD', KEYS[2])
for k = 3, #KEYS do
  local text, page = redis.pcall('GET', KEYS[k]), string.sub(KEYS[k], prefix + 1)
  if type(text) ~= 'string' or not isPage(text) then -- it is forgotten, or the value of another program, which stays
    redis.call('ZREM', KEYS[2], page)
  else
    local r, users, updated, inc, _, own, _, length = readPage(text)
    local others, _, held = elsewhere(pairsOf(text, length), peers, updated)
    if r == rebuild and users > 0 or others > 0 or held then
      redis.call('PERSIST', KEYS[k])
      redis.call('ZREM', KEYS[2], page)
    elseif ARGV[3] == '1' then
      -- Nothing else will know what versions and pairs the page had.
      past = math.max(past, inc, own)
      redis.call('HSET', KEYS[1], 'past', whole(past))
      redis.call('UNLINK', KEYS[k])
      redis.call('ZREM', KEYS[2], page)
    else
      emptied(KEYS[k], page, KEYS[2], second, ARGV[2])
    end
  end
end
if ARGV[4] ~= '' then redis.call('HSET', KEYS[1], 'swept', ARGV[4]) end
return {state[4] or '', state[5] or ''}
