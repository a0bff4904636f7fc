# Reads the output of `go test -v` for several packages, or of `node --test`. Prints a line for each package, the whole
# output of a failed one, and how many tests ran in real time: TestServer..., TestClock..., and every test of node. A
# test that takes less than 50 ms is usually a row of a table on a running server, and waits for nothing.

!/^ *=== (RUN|PAUSE|CONT|NAME)/ { said = said $0 "\n" }

match($0, /^ *--- (PASS|FAIL|SKIP): Test(Server|Clock)/) {
	name = $3
	leaves[name] = substr($4, 2) + 0
	while (sub(/\/[^\/]*$/, "", name)) inner[name] = 1
}

/^(ok  |FAIL|\?   )\t/ {
	before = ran
	count()

	if (/^FAIL/) printf "%s", said
	else if (!/\[no test/) print $0 (ran > before ? "\t" ran - before " in real time" : "")
	said = ""
}

/^(ℹ|#) tests [0-9]+/ { ran += $3; slow += $3 }
node { print }
/^(▶|✔|✖|ℹ|TAP version)/ && !node { node = 1; printf "%s", said }

function count(name) {
	for (name in leaves) {
		if (name in inner) continue
		ran++
		if (leaves[name] >= 0.05) slow++
	}
	split("", leaves)
	split("", inner)
}

END {
	if (!node) printf "%s", said
	printf "== ran %d in real time, %d of them for 50 ms or more\n", ran, slow
}
