#!/bin/sh
# Installs what building and testing need and this machine lacks: redis-server,
# PostgreSQL, PgBouncer, nginx, chromium, node with npm, a C compiler (for the race
# detector), on Linux the other proxies of deploy/proxy, Prometheus, dpkg and spin. Silent
# and quick when all is there. Go itself is not installed: distributions lag behind.
#
# When it may not install, or does not know the package manager, it says what
# is missing and which command installs it, and exits with status 1.
set -eu

node_least=20.19 # what web/package.json asks for

PATH=$PATH:/usr/sbin:/usr/local/sbin # which a user's may lack
has() { command -v "$1" >/dev/null 2>&1; }
say() { printf 'setup: %s\n' "$*" >&2; }
die() {
	say "$@"
	exit 1
}

has_chromium() { has "${CHROMIUM:-chromium}" || has chromium-browser || has google-chrome || has google-chrome-stable; }
has_node() { has node && has npm; }
# has_postgres: a distribution that keeps several versions has none in the PATH.
has_postgres() {
	has postgres && has initdb && return
	for dir in /usr/lib/postgresql/*/bin /usr/libexec/postgresql* /usr/pgsql-*/bin /opt/homebrew/opt/postgresql*/bin; do
		[ -x "$dir/postgres" ] && [ -x "$dir/initdb" ] && return
	done
	return 1
}
has_nginx() { has nginx || [ -x /usr/sbin/nginx ] || [ -x /usr/local/sbin/nginx ]; } # which a user's PATH may lack
has_cc() { has gcc || has clang || has cc; }

# missing prints the names of this script for what is not there.
missing() {
	has redis-server || printf 'redis '
	has_postgres || printf 'postgres '
	has pgbouncer || printf 'pgbouncer '
	has_nginx || printf 'nginx '
	has_chromium || printf 'chromium '
	has_node || printf 'node '
	has_cc || printf 'cc '
	[ "$(uname)" = Linux ] || return 0
	has haproxy || printf 'haproxy '
	has caddy || printf 'caddy '
	has apache2 || has httpd || printf 'apache '
	has openssl || printf 'openssl '
	has dpkg || printf 'dpkg '
	has prometheus && has promtool || printf 'prometheus '
	has apk || has spin || printf 'spin ' # Alpine has none
}

check_go() {
	has go || die "go is missing; install the version that go.mod names, from the Go project's site"
}

check_node() {
	version=$(node -p 'process.versions.node')
	rest=${version#*.}
	least_rest=${node_least#*.}
	[ "${version%%.*}" -gt "${node_least%%.*}" ] ||
		{ [ "${version%%.*}" -eq "${node_least%%.*}" ] && [ "${rest%%.*}" -ge "$least_rest" ]; } ||
		die "node is $version; the tests of web/ need $node_least or newer: install it from the Node.js project's site"
}

# packages MANAGER NAME...: what the package manager calls them.
packages() {
	manager=$1
	shift
	for name; do
		case $manager/$name in
		apt-get/redis) echo redis-server ;;
		apt-get/postgres | apk/postgres) echo postgresql ;;
		dnf/postgres) echo postgresql-server ;;
		brew/postgres) echo postgresql@17 ;;
		apt-get/node) echo nodejs npm ;;
		apt-get/cc) echo gcc libc6-dev ;;
		dnf/node) echo nodejs npm ;;
		dnf/cc) echo gcc glibc-devel ;;
		apk/node) echo nodejs npm ;;
		apk/cc) echo gcc musl-dev ;;
		apt-get/apache) echo apache2 ;;
		dnf/apache) echo httpd mod_ssl ;;
		dnf/prometheus) echo golang-github-prometheus ;;
		apk/apache) echo apache2 apache2-proxy apache2-ssl ;;
		brew/cc) ;; # comes with the command line tools, as brew does
		*) echo "$name" ;;
		esac
	done
}

# as_root COMMAND...: runs it as root, without ever asking for a password.
as_root() {
	if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

may_install() {
	[ "$(id -u)" = 0 ] || { has sudo && sudo -n true 2>/dev/null; }
}

# apt_install PACKAGE...: installs them and starts none of their services.
# Debian asks policy-rc.d before a package starts its service; ours says no
# while this runs. One that is there already is somebody's own and stays.
apt_install() {
	policy=/usr/sbin/policy-rc.d
	if [ ! -e $policy ]; then
		trap 'as_root rm -f $policy' EXIT
		trap 'exit 130' INT
		trap 'exit 143' TERM
		as_root sh -c "printf '#!/bin/sh\nexit 101\n' >$policy && chmod 755 $policy"
	fi
	as_root env DEBIAN_FRONTEND=noninteractive apt-get -q update >&2 ||
		say "apt-get update went wrong; trying with the lists that are there"
	as_root env DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends "$@" >&2
}

# no_service NAME...: the tests start servers of their own, so those that a
# package brought must not start with the machine either.
no_service() {
	for service; do
		if has systemctl; then as_root systemctl disable --now $service >/dev/null 2>&1 || true; fi
		if has update-rc.d; then as_root update-rc.d $service disable >/dev/null 2>&1 || true; fi
		if has rc-update; then as_root rc-update del $service >/dev/null 2>&1 || true; fi
	done
}

main() {
	check_go
	lacks=$(missing)
	if [ -n "$lacks" ]; then
		manager=
		for m in apt-get dnf apk brew; do
			if has $m; then
				manager=$m
				break
			fi
		done
		[ -n "$manager" ] || die "missing: $lacks- and none of apt-get, dnf, apk and brew is here; install them by hand"

		# shellcheck disable=SC2046,SC2086 # lists of words
		set -- $(packages $manager $lacks)
		case $manager in
		apt-get) by_hand="apt-get update && apt-get install -y --no-install-recommends $*" ;;
		dnf) by_hand="dnf install -y $*" ;;
		apk) by_hand="apk add $*" ;;
		brew) by_hand="brew install $*" ;;
		esac
		if [ $manager = brew ]; then # it refuses to run as root
			[ $# -gt 0 ] || die "missing: $lacks- run: xcode-select --install"
		elif ! may_install; then
			die "missing: $lacks- and this user may not install packages; as root run: $by_hand"
		fi

		say "installing $*"
		case $manager in
		apt-get) apt_install "$@" ;;
		dnf) as_root dnf install -y "$@" >&2 ;;
		apk) as_root apk add "$@" >&2 ;;
		brew) brew install "$@" >&2 ;;
		esac || die "$manager could not install them; try by hand: $by_hand"

		if [ $manager != brew ]; then
			case " $lacks" in *' redis '*) no_service redis-server redis ;; esac
			case " $lacks" in *' postgres '*) no_service postgresql ;; esac
			for service in pgbouncer nginx haproxy caddy prometheus; do
				case " $lacks" in *" $service "*) no_service $service ;; esac
			done
			case " $lacks" in *' apache '*) no_service apache2 httpd ;; esac
		fi
		hash -r 2>/dev/null || true
		lacks=$(missing)
		[ -z "$lacks" ] || die "still missing after the installation: $lacks- install them by hand"
	fi
	check_node
}

main
