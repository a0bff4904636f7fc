-- mark.lua is prepended to the scripts in scripts.Marked: record the number of this run, so that its process can tell
-- whether Redis still has everything that it acknowledged (redisconn/marks.go).
--
-- The last key     hc:{tag}:mark:<process>  string: number of the newest run; the process creates it at its first check
-- The last two of ARGV  the number of this run, and the newest acknowledged number; both empty while there is no mark
-- A mark that is missing or older than the acknowledged number shows a loss of data. The script leaves such a mark as
-- it is until the process has seen it. It also leaves a newer mark, since runs may arrive out of order. Numbers have 16
-- digits, so that they compare as strings. The mark of a process that has ended expires after a week.
do
  local mark, acknowledged, number = table.remove(KEYS), table.remove(ARGV), table.remove(ARGV)
  local is = redis.call('GET', mark)
  if is and is >= acknowledged and is < number then redis.call('SET', mark, number, 'EX', 604800) end
end
