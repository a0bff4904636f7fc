#!/usr/bin/env bash
# Three regions as processes of this machine, until Ctrl-C: us, eu and ap, each
# with a redis-server and one `headcount serve`, on loopback. `make regions`
# builds the program and runs this. And, meanwhile, in another terminal:
#
#	deploy/regions.sh cut us eu     cut the link between two of them
#	deploy/regions.sh heal us eu    mend it
#	deploy/regions.sh cut           cut all links; `heal` mends all
#
# A region reaches another's Redis as a user of its own (redis ACL), so a link is
# cut by switching that user off.
#
# Set in the environment, of us, eu and ap, also for cut and heal:
#
#	REDIS_PORTS      6391 6392 6393
#	LISTEN_PORTS     8080 8180 8280
#	ADMIN_PORTS      8081 8181 8281
#	CLUSTER_PORTS    7946 7956 7966, TCP and UDP
#	HEADCOUNT_BIN    the program; else bin/headcount
#	REGION_STALE_AFTER  30s: how long a region may be silent
#
# Exit status 0 after SIGINT, SIGTERM or SIGHUP and an orderly end of all; 1 for
# anything else.
set -euo pipefail

names=(us eu ap)
# shellcheck disable=SC2206 # lists of words
{
	redis=(${REDIS_PORTS:-6391 6392 6393})
	listen=(${LISTEN_PORTS:-8080 8180 8280})
	admin=(${ADMIN_PORTS:-8081 8181 8281})
	cluster=(${CLUSTER_PORTS:-7946 7956 7966})
}
here=$(cd "$(dirname "$0")" && pwd)
bin=${HEADCOUNT_BIN:-$here/../bin/headcount}
unset HEADCOUNT_BIN # it is no setting
ready_within=90 # seconds; 12 when the machine has nothing else to do

say() { printf '%s\n' "$*"; }
die() {
	printf 'regions: %s\n' "$*" >&2
	exit 1
}

# index NAME: the place of a region in the lists.
index() {
	local i
	for i in 0 1 2; do
		if [ "${names[i]}" = "$1" ]; then
			say "$i"
			return
		fi
	done
	die "no region is called $1; there are ${names[*]}"
}

# command PORT WORD...: one command to a redis-server.
command_to() {
	local port=$1
	shift
	redis-cli -p "$port" --no-auth-warning "$@" >/dev/null ||
		die "redis-server on port $port does not answer; is make regions running?"
}

# switch on|off FROM TO: whether region FROM reaches the Redis of TO.
switch() {
	local port=${redis[$3]} user=${names[$2]}
	command_to "$port" ACL SETUSER "$user" "$1"
	if [ "$1" = off ]; then command_to "$port" CLIENT KILL USER "$user"; fi
}

# links on|off [A B]: all links, or the one between two regions, both ways.
links() {
	local a b i j word=$1
	shift
	if [ $# = 2 ]; then
		a=$(index "$1") b=$(index "$2")
		[ "$a" != "$b" ] || die 'name two regions'
		switch "$word" "$a" "$b"
		switch "$word" "$b" "$a"
		return
	fi
	[ $# = 0 ] || die 'name two regions, or none for all links'
	for i in 0 1 2; do
		for j in 0 1 2; do
			if [ $i != $j ]; then switch "$word" $i $j; fi
		done
	done
}

[ ${#redis[@]}${#listen[@]}${#admin[@]}${#cluster[@]} = 3333 ] ||
	die 'REDIS_PORTS, LISTEN_PORTS, ADMIN_PORTS, CLUSTER_PORTS: write 3 ports, of us, eu and ap'
case ${1-} in
cut)
	links off "${@:2}"
	say 'cut: each side goes on counting its own'
	exit
	;;
heal)
	links on "${@:2}"
	say 'healed: all show the same total within seconds'
	exit
	;;
esac

[ -x "$bin" ] || die "$bin is not there; run make build, or name another in HEADCOUNT_BIN"
if ! command -v redis-server >/dev/null || ! command -v redis-cli >/dev/null; then sh "$here/setup.sh"; fi
for port in "${redis[@]}" "${listen[@]}" "${admin[@]}" "${cluster[@]}"; do
	if (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
		die "port $port is somebody else's; end that, or choose others: see the head of $0"
	fi
done
if command -v setsid >/dev/null; then session=(setsid); else session=(perl -e 'setpgrp; exec @ARGV or die "$!\n"'); fi

dir=$(mktemp -d "${TMPDIR:-/tmp}/headcount-regions.XXXXXX")
password=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
: "${HEADCOUNT_CLUSTER_SECRET:=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}"
: "${HEADCOUNT_LOG_FORMAT:=console}"
export HEADCOUNT_CLUSTER_SECRET HEADCOUNT_LOG_FORMAT
signal='' # the one that ends this
servers=() programs=()

# finish ends all, however this script ends.
finish() {
	status=$?
	trap - EXIT
	trap '' PIPE
	set +e
	say 'stopping the programs, then redis'
	{
		for pid in ${programs[@]+"${programs[@]}"}; do kill -TERM "$pid"; done
		for pid in ${programs[@]+"${programs[@]}"}; do
			wait "$pid" || status=1
		done
		for pid in ${servers[@]+"${servers[@]}"}; do kill -TERM "$pid"; done
		wait
	} 2>/dev/null
	if [ $status = 0 ]; then
		rm -rf "$dir"
		say 'all have ended'
	else
		say "all have ended; their logs are in $dir"
	fi
	exit $status
}
trap finish EXIT
trap 'signal=1' INT TERM HUP

# await COMMAND...: until it succeeds.
await() {
	local until=$((SECONDS + ready_within)) pid
	until "$@"; do
		[ -z "$signal" ] || exit 0
		for pid in ${servers[@]+"${servers[@]}"} ${programs[@]+"${programs[@]}"}; do
			kill -0 "$pid" 2>/dev/null ||
				die "a process has ended at its start; the ends of the logs: $(tail -n 3 "$dir"/*.log)"
		done
		[ $SECONDS -lt $until ] || die "not ready after $ready_within s; the logs are in $dir"
		sleep 0.2
	done
}
answers() { redis-cli -p "$1" PING >/dev/null 2>&1; }
ready() {
	(
		exec 3<>"/dev/tcp/127.0.0.1/$1" && printf 'GET /readyz HTTP/1.0\r\n\r\n' >&3 &&
			IFS= read -r -t 2 line <&3 && [[ $line == *' 200 '* ]]
	) 2>/dev/null
}

say "starting; the logs are in $dir"
for i in 0 1 2; do
	mkdir "$dir/${names[i]}"
	"${session[@]}" redis-server --bind 127.0.0.1 --port "${redis[i]}" \
		--dir "$dir/${names[i]}" --save '' --appendonly no \
		</dev/null >>"$dir/redis-${names[i]}.log" 2>&1 &
	servers+=($!)
done
# What another region may do here: what redis.acl says, under a name of its own.
read -r _ _ _ _ rules <"$here/redis.acl"
read -ra rules <<<"$rules"
for i in 0 1 2; do
	await answers "${redis[i]}"
	for j in 0 1 2; do
		if [ $i != $j ]; then
			command_to "${redis[i]}" ACL SETUSER "${names[j]}" on ">$password" "${rules[@]}"
		fi
	done
done
for i in 0 1 2; do
	peers=()
	for j in 0 1 2; do
		if [ $i != $j ]; then peers+=("${names[j]}=redis://${names[i]}:$password@127.0.0.1:${redis[j]}"); fi
	done
	# In the environment, since everyone may read command lines.
	HEADCOUNT_PEER="${peers[0]},${peers[1]}" "${session[@]}" "$bin" serve --region "${names[i]}" \
		--redis "redis://127.0.0.1:${redis[i]}" --region-stale-after "${REGION_STALE_AFTER:-30s}" \
		--listen "127.0.0.1:${listen[i]}" --admin-listen "127.0.0.1:${admin[i]}" \
		--cluster-listen "127.0.0.1:${cluster[i]}" \
		--shutdown-timeout 10s "$@" </dev/null >>"$dir/${names[i]}.log" 2>&1 &
	programs+=($!)
done
for i in 0 1 2; do await ready "${admin[i]}"; done

printf '\n%-8s %-26s %-24s %s\n' region open admin redis
for i in 0 1 2; do
	printf '%-8s %-26s %-24s %s\n' "${names[i]}" "http://127.0.0.1:${listen[i]}/" \
		"127.0.0.1:${admin[i]}" "127.0.0.1:${redis[i]}"
done
say
say "ready; the parts of a total:  curl '127.0.0.1:${listen[0]}/demo/counter?regions=1'"
say "cut a link and mend it:       deploy/regions.sh cut us eu;  deploy/regions.sh heal us eu"
say 'Ctrl-C stops all'
while [ -z "$signal" ]; do
	sleep 0.5 || true
	for i in 0 1 2; do
		kill -0 "${programs[i]}" 2>/dev/null ||
			die "${names[i]} has ended; its log: $(tail -n 3 "$dir/${names[i]}.log")"
	done
done 2>/dev/null
