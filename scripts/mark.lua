-- mark.lua comes before a script of scripts.Marked: note the number of this run, so that its process can tell whether
-- Redis has kept what it acknowledged (redisconn/marks.go).
--
-- The last key     hc:{tag}:mark:<process>  string: number of the newest run; it is there from the process's first look on
-- The last two of ARGV  the number of this run, and that of the newest acknowledged one; both empty while there is no mark
-- A mark that is missing or older than what was acknowledged shows a loss: it stays as it is until the process has seen
-- it. So does a newer one, since runs may come out of order. Numbers have 16 digits, and compare as strings. The mark of a
-- process that has ended expires after a week.
do
  local mark, acknowledged, number = table.remove(KEYS), table.remove(ARGV), table.remove(ARGV)
  local is = redis.call('GET', mark)
  if is and is >= acknowledged and is < number then redis.call('SET', mark, number, 'EX', 604800) end
end
