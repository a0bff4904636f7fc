-- counter_number.lua: integers of 64 bits as decimal strings, because Lua's numbers are exact only up to 2^53. Other
-- scripts include this file; it does not run by itself.

local MOST, LEAST = '9223372036854775807', '-9223372036854775808'

-- compare returns a number below, equal to or above 0 if a is less than, equal to or greater than b.
local function compare(a, b)
  if a == b then return 0 end
  local below = string.sub(a, 1, 1) == '-'
  if below ~= (string.sub(b, 1, 1) == '-') then return below and -1 or 1 end
  local order
  if #a ~= #b then order = #a < #b and -1 or 1 else order = a < b and -1 or 1 end
  return below and -order or order
end

-- A limb has 7 decimal digits, the highest one also more: three limbs hold a sum of some hundred numbers of 64 bits.
local LIMB = 10000000

local function limbs(text)
  local sign = 1
  if string.sub(text, 1, 1) == '-' then sign, text = -1, string.sub(text, 2) end
  text = string.rep('0', 21 - #text) .. text
  return sign * tonumber(string.sub(text, -7)), sign * tonumber(string.sub(text, -14, -8)), sign * tonumber(string.sub(text, 1, -15))
end

local function carry(low, middle, high)
  local over = math.floor(low / LIMB)
  low, middle = low - over * LIMB, middle + over
  over = math.floor(middle / LIMB)
  return low, middle - over * LIMB, high + over
end

-- sumOf returns a + b, which may have more than 64 bits. Up to 15 digits Lua's numbers are exact.
local function sumOf(a, b)
  if #a <= 15 and #b <= 15 then return string.format('%.0f', tonumber(a) + tonumber(b)) end
  local a0, a1, a2 = limbs(a)
  local b0, b1, b2 = limbs(b)
  local low, middle, high = carry(a0 + b0, a1 + b1, a2 + b2)
  local sign = ''
  if high < 0 then
    sign = '-'
    low, middle, high = carry(-low, -middle, -high)
  end
  local text = string.gsub(string.format('%.0f%07.0f%07.0f', high, middle, low), '^0+', '')
  if text == '' then return '0' end
  return sign .. text
end

-- plus returns a + b, or nil if it overflows 64 bits.
local function plus(a, b)
  local text = sumOf(a, b)
  if #text > 18 and (compare(text, MOST) > 0 or compare(text, LEAST) < 0) then return nil end
  return text
end

-- negative returns -a.
local function negative(a)
  if a == '0' then return a end
  if string.sub(a, 1, 1) == '-' then return string.sub(a, 2) end
  return '-' .. a
end

-- opposite returns -a, or nil if it overflows 64 bits.
local function opposite(a) return a ~= LEAST and negative(a) or nil end

-- minus returns a - b, or nil if it overflows 64 bits.
local function minus(a, b) return plus(a, negative(b)) end
