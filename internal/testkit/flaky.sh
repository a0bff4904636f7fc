#!/usr/bin/env bash
# Runs tests N times and prints how often each failed: the tests that changed since the commit SINCE, or all of the
# packages PKG. TESTS is a regular expression that their names must match. `make flaky` runs it beside busy loops.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# changed prints the package and the name of each test that changed. A changed line outside of tests stands for all
# tests of its file.
changed() {
	git diff --unified=0 --diff-filter=AMR "$SINCE" -- '*_test.go' | awk '
		/^\+\+\+ / { file = substr($2, 3) }
		/^@@ / { split(substr($3, 2), at, ","); print file, at[1], at[1] + (at[2] > 1 ? at[2] - 1 : 0) }' |
		while read -r file first last; do
			awk -v first="$first" -v last="$last" -v file="$file" '
				/^func / { test = match($2, /^Test[A-Z]/) ? substr($2, 1, index($2, "(") - 1) : "" }
				test { all[test] }
				FNR >= first && FNR <= last {
					if (test) some[test]; else if (/[^ \t]/ && !/^import|^\t"|^\)/) outside = 1
				}
				/^}/ { test = "" }
				END {
					if (!sub(/\/[^\/]*$/, "", file)) file = "."
					if (outside) for (name in all) print file, name
					else for (name in some) print file, name
				}' "$file"
		done | grep -v TestMain | sort -u
}

log=$(mktemp)
trap 'rm -f "$log"' EXIT
run() {
	go test -v -count="$N" -vet=off -timeout 0 -run "$2" "./$1" >>"$log" 2>&1 || true
}

if [ -n "$PKG" ]; then
	for package in $PKG; do
		run "${package#./}" "${TESTS:-.}"
	done
else
	tests=$(changed)
	for package in $(cut -d' ' -f1 <<<"$tests" | sort -u); do
		names=$(awk -v package="$package" '$1 == package { print $2 }' <<<"$tests" |
			grep -E "${TESTS:-.}" | paste -sd '|' -) || true
		run "$package" "^($names)$"
	done
fi

# A package may also fail in its TestMain, or without building.
if ! awk '
	/^ *--- (PASS|FAIL): / { ran[$3]++ }
	/^ *--- FAIL: / { failed[$3]++ }
	/^FAIL\t/ { packages[$2]++ }
	END {
		for (name in ran) printf "%4d of %4d failed  %s\n", failed[name], ran[name], name
		for (name in packages) { printf "FAIL %s\n", name; bad = 1 }
		exit bad
	}' "$log" | sort -rn; then
	grep -vE '^ *(=== (RUN|PAUSE|CONT|NAME)|--- PASS)' "$log" | tail -200
	exit 1
fi
