#!/usr/bin/env bash
# A whole cluster as processes of this machine, until Ctrl-C: redis-server,
# 2 gateways, 3 presence nodes and 2 dispatchers, on loopback. `make cluster`
# builds the program and runs this. Arguments go to every `headcount serve`.
#
# Set in the environment:
#
#	REDIS_PORT       6390
#	LISTEN_PORTS     8080 8090, of the gateways
#	ADMIN_PORTS      8081 8091  8101 8102 8103  8111 8112, of all in order
#	CLUSTER_PORTS    7946 to 7952, TCP and UDP, of all in order
#	CLUSTER_LOGS     a directory that keeps the logs; else they go with an orderly end
#	HEADCOUNT_BIN    the program; else bin/headcount
#	HEADCOUNT_…      settings of all processes, as always; a random
#	                 HEADCOUNT_CLUSTER_SECRET when there is none
#
# Kill one with `kill -9 PID` and the others go on; `kill -USR1` with the pid of
# this script starts again what has ended. README.md says what one sees.
#
# Exit status 0 after SIGINT, SIGTERM or SIGHUP and an orderly end of all that
# ran; a second signal kills what is left. 1 for anything else.
set -euo pipefail

names=(redis gateway-1 gateway-2 presence-1 presence-2 presence-3 dispatcher-1 dispatcher-2)
redis_port=${REDIS_PORT:-6390}
# shellcheck disable=SC2206 # lists of words; redis, the first, has none of these
{
	listen=(- ${LISTEN_PORTS:-8080 8090})
	admin=(- ${ADMIN_PORTS:-8081 8091 8101 8102 8103 8111 8112})
	cluster=(- ${CLUSTER_PORTS:-7946 7947 7948 7949 7950 7951 7952})
}
ready_within=60 # seconds; 5 when the machine has nothing else to do
drain_within=10 # --shutdown-timeout; SIGKILL comes 2 seconds later

here=$(cd "$(dirname "$0")" && pwd)
bin=${HEADCOUNT_BIN:-$here/../bin/headcount}
unset HEADCOUNT_BIN # it is no setting
args=("$@")
pids=('' '' '' '' '' '' '' '') # by index of names; empty for what does not run
status=0
signal='' # the one that ends this
again=''  # set by SIGUSR1
dir=''

say() { printf '%s\n' "$*"; }
die() {
	printf 'cluster: %s\n' "$*" >&2
	exit 1
}

# request PORT TEXT: the answer's first line and, of HTTP, its last.
request() {
	(
		exec 3<>"/dev/tcp/127.0.0.1/$1" && printf '%b' "$2" >&3 || exit 1
		while IFS= read -r -t 2 line <&3; do
			[ -n "${first-}" ] || printf '%s ' "${first=${line%$'\r'}}"
			case $first in HTTP*) last=$line ;; *) break ;; esac
		done
		printf '%s' "${last-}"
	) 2>/dev/null
}

# lacks INDEX: why that process is not ready; nothing when it is.
lacks() {
	local answer
	if [ "$1" = 0 ]; then
		answer=$(request "$redis_port" 'PING\r\n') || true
	else
		answer=$(request "${admin[$1]}" 'GET /readyz HTTP/1.0\r\n\r\n') || true
	fi
	case $answer in
	+PONG* | HTTP/1.?' 200 '*) ;;
	'') say 'no answer' ;;
	*) say "$answer" ;;
	esac
}

alive() { [ -n "${pids[$1]}" ] && kill -0 "${pids[$1]}" 2>/dev/null; }

# launch INDEX: starts it in a session of its own, since Ctrl-C goes to a whole
# process group and would end all at once.
launch() {
	local i=$1 name=${names[$1]}
	local command=(redis-server --bind 127.0.0.1 --port "$redis_port" --dir "$dir" --save '' --appendonly no)
	if [ "$i" != 0 ]; then
		command=("$bin" serve --redis "redis://127.0.0.1:$redis_port" --roles "${name%-*}"
			--admin-listen "127.0.0.1:${admin[i]}" --shutdown-timeout "${drain_within}s"
			--cluster-listen "127.0.0.1:${cluster[i]}" --advertise "127.0.0.1:${cluster[i]}")
		if [ -n "${listen[i]-}" ]; then command+=(--listen "127.0.0.1:${listen[i]}"); fi
		command+=(${args[@]+"${args[@]}"})
	fi
	"${session[@]}" "${command[@]}" </dev/null >>"$dir/$name.log" 2>&1 &
	pids[i]=$!
}

# ended INDEX: takes note that it has, and returns its status.
ended() {
	local pid=${pids[$1]}
	pids[$1]=''
	wait "$pid"
}

# await INDEX...: until all are ready. A start goes wrong as a whole.
await() {
	local i why until=$((SECONDS + ready_within))
	for i; do
		while why=$(lacks "$i") && [ -n "$why" ]; do
			[ -z "$signal" ] || exit 0
			if ! alive "$i"; then
				ended "$i" || why="status $?"
				wrong "$i" "ended with $why at its start"
			fi
			[ $SECONDS -lt $until ] || wrong "$i" "is not ready after $ready_within s: $why"
			sleep 0.2
		done
	done
}

# wrong INDEX WHAT: says so, with the last lines of its log, and ends all.
wrong() {
	printf 'cluster: %s %s; the end of its log:\n' "${names[$1]}" "$2" >&2
	tail -n 10 "$dir/${names[$1]}.log" | sed 's/^/    /' >&2
	exit 1
}

# halt INDEX...: sends them SIGTERM, and SIGKILL when the drain takes too long.
halt() {
	local i code until=$((SECONDS + drain_within + 2))
	for i; do
		# A process that was stopped by hand hears nothing until it goes on.
		if alive "$i"; then kill -TERM "${pids[i]}" && kill -CONT "${pids[i]}"; fi
	done
	for i; do
		[ -n "${pids[i]}" ] || continue
		while alive "$i" && [ $SECONDS -lt $until ] && [ -z "$signal" ]; do sleep 0.1; done
		if alive "$i"; then
			say "${names[i]} is killed: it has not ended"
			kill -KILL "${pids[i]}"
		fi
		code=0
		ended "$i" || code=$?
		# 143: SIGTERM came before it could be handled, right after its start.
		[ $code = 0 ] || [ $code = 143 ] || status=1
		[ $code = 0 ] || [ $code = 143 ] || [ $code = 137 ] || say "${names[i]} ended with status $code"
	done
}

# finish ends all, however this script ends.
finish() {
	status=$?
	trap - EXIT
	trap '' USR1 PIPE
	set +e
	signal='' # the next one hurries
	say 'stopping gateways, then presence nodes and dispatchers, then redis; once more to kill them'
	{
		halt 1 2
		halt 3 4 5 6 7
		halt 0
	} 2>/dev/null # as below
	if [ -z "${CLUSTER_LOGS-}" ] && [ $status = 0 ]; then
		rm -rf "$dir"
		say 'all have ended'
	else
		say "all have ended; their logs are in $dir"
	fi
	exit $status
}

[ ${#listen[@]} = 3 ] || die 'LISTEN_PORTS: write 2 ports, of the gateways'
[ ${#admin[@]} = 8 ] || die 'ADMIN_PORTS: write 7 ports, of 2 gateways, 3 presence nodes and 2 dispatchers'
[ ${#cluster[@]} = 8 ] || die 'CLUSTER_PORTS: write 7 ports, of 2 gateways, 3 presence nodes and 2 dispatchers'
[ -x "$bin" ] || die "$bin is not there; run make build, or name another in HEADCOUNT_BIN"
command -v redis-server >/dev/null || sh "$here/setup.sh"
for port in "$redis_port" "${listen[@]:1}" "${admin[@]:1}" "${cluster[@]:1}"; do
	if (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
		die "port $port is somebody else's; end that, or choose others: see the head of $0"
	fi
done
if command -v setsid >/dev/null; then session=(setsid); else session=(perl -e 'setpgrp; exec @ARGV or die "$!\n"'); fi

if [ -n "${CLUSTER_LOGS-}" ]; then
	mkdir -p "$CLUSTER_LOGS"
	dir=$(cd "$CLUSTER_LOGS" && pwd)
else
	dir=$(mktemp -d "${TMPDIR:-/tmp}/headcount-cluster.XXXXXX")
fi
# In the environment, since everyone may read command lines.
: "${HEADCOUNT_CLUSTER_SECRET:=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}"
: "${HEADCOUNT_LOG_FORMAT:=console}"
export HEADCOUNT_CLUSTER_SECRET HEADCOUNT_LOG_FORMAT

trap finish EXIT
trap 'signal=1' INT TERM HUP
trap 'again=1' USR1

say "starting; the logs are in $dir"
launch 0
await 0
for i in 1 2 3 4 5 6 7; do launch "$i"; done
await 1 2 3 4 5 6 7

printf '\n%-13s %8s  %-24s %-24s %s\n' process pid open admin cluster
printf '%-13s %8s  %s\n' redis "${pids[0]}" "redis://127.0.0.1:$redis_port"
for i in 1 2 3 4 5 6 7; do
	url=-
	if [ -n "${listen[i]-}" ]; then url=http://127.0.0.1:${listen[i]}/; fi
	printf '%-13s %8s  %-24s %-24s %s\n' "${names[i]}" "${pids[i]}" "$url" \
		"127.0.0.1:${admin[i]}" "127.0.0.1:${cluster[i]}"
done
printf '\nready; Ctrl-C stops all, kill -9 PID one of them, kill -USR1 %s starts that again\n' $$

while [ -z "$signal" ]; do
	sleep 0.5 || true
	for i in "${!names[@]}"; do
		if [ -n "${pids[i]}" ] && ! alive "$i"; then
			pid=${pids[i]} code=0
			ended "$i" || code=$?
			say "${names[i]} (pid $pid) has ended with status $code; the others go on"
		fi
	done
	if [ -n "$again" ]; then
		again=''
		for i in "${!names[@]}"; do
			if [ -z "${pids[i]}" ]; then
				launch "$i"
				say "${names[i]} is started again, pid ${pids[i]}"
			fi
		done
	fi
done 2>/dev/null # bash would report every kill -9 too, with a line of this script
