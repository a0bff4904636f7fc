# What CI runs is what these targets run: .ci/run calls `make test`.

GO      ?= go
ARGS    ?=                  # make run ARGS='--listen :9000'
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null)
LDFLAGS  = -s -w $(if $(VERSION),-X main.version=$(VERSION))

# Bounds on a hang, not expectations. Two packages at a time, since many tests
# are about time and all of them share the machine's cores. Lint has run go vet.
TESTFLAGS ?= -race -count=1 -timeout 6m -p 2 -vet=off
BENCHTIME ?= 1s
FUZZTIME  ?= 10s

# The stores whose contract runs for minutes on real servers. Their tests run
# without the race detector, which the programs of other tests have, and with a fifth
# of the random histories; after a change there run them with -race and with all.
SERVED   = (counter/(redisstore|pgstore|persistent)|presence/redisstore)$$

# The packages that start whole processes, one after the other, beside all others: they
# mostly wait. The processes have the race detector, their clients do not need it, nor
# does what packs a release. The tests of the root are part of lint.
WHOLE    = ./cmd/headcount/faults ./cmd/headcount/e2e ./cmd/release
OTHERS   = $$($(GO) list ./... | grep -vE '^headcount$$|cmd/headcount/(e2e|faults)$$|cmd/release$$|$(SERVED)')
RACE_BIN = HEADCOUNT_BIN='$(CURDIR)/bin/headcount-race'

GOFILES  = $$(find . -name node_modules -prune -o -name .git -prune -o -name '*.go' -print)

# The browser for the tests of web/, whatever the distribution calls it.
BROWSER  = $${CHROMIUM:-$$(for b in chromium chromium-browser google-chrome google-chrome-stable; do command -v $$b && break; done)}

# part NAME,COMMAND runs one part of a target, says how long it took and, when
# it went wrong, which one it was.
define part
@printf '\n== %s\n' '$(1)'; start=$$(date +%s); \
if $(2); then printf '== %s: ok, %s s\n' '$(1)' $$(($$(date +%s) - start)); \
else printf '== %s: FAILED after %s s\n' '$(1)' $$(($$(date +%s) - start)) >&2; exit 1; fi
endef

.DEFAULT_GOAL := build
.NOTPARALLEL:
.PHONY: run cluster regions build release image lint check test upgrade bench hostile microbench soak fuzz picture setup clean race-binary

run: build
	./bin/headcount serve $(ARGS)

# Gateways, presence nodes and dispatchers over Redis, as processes, until
# Ctrl-C. The ports are variables of deploy/cluster.sh.
cluster: build
	@HEADCOUNT_BIN=bin/headcount bash deploy/cluster.sh $(ARGS)

# Three regions with a Redis and a process each, until Ctrl-C; deploy/regions.sh
# says how to cut a link between two of them.
regions: build
	@HEADCOUNT_BIN=bin/headcount bash deploy/regions.sh $(ARGS)

build:
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o bin/headcount ./cmd/headcount

# Archives for linux and darwin with checksums and lists of modules, in dist/:
# make release VERSION=v1.2.3. And the same as a container image.
release:
	$(GO) run ./cmd/release -version '$(VERSION)'

image:
	docker build --build-arg VERSION='$(VERSION)' -t headcount:'$(VERSION)' .

# What the compiler does not find: format, vet, staticcheck. The tests of the root
# hold the direction of imports, and type-check everything for the other systems.
lint:
	@unformatted=$$(gofmt -l $(GOFILES)) || exit 1; \
	if [ -n "$$unformatted" ]; then printf 'not formatted; run gofmt -w on:\n%s\n' "$$unformatted" >&2; exit 1; fi
	$(GO) vet ./...
	$(GO) vet -tags upgrade ./cmd/headcount/faults
	$(GO) tool staticcheck ./...
	$(GO) test -count=1 .

# The same, and vet for the other systems, which first compiles everything for each.
SYSTEMS = darwin/amd64 darwin/arm64 linux/arm64 freebsd/amd64
check: lint
	@set -e; for system in $(SYSTEMS); do \
		echo "$(GO) vet for $$system"; GOOS=$${system%/*} GOARCH=$${system#*/} $(GO) vet ./...; done

# Packages that have files of their own for Linux or Unix. The tag `portable`
# leaves these out, so Linux tests what the other systems run. Most of it runs with
# -race too: the tests of connections run both ways.
PORTABLE = ./machine ./gateway ./gateway/fanout ./gateway/policy ./gateway/socket

# It mostly waits, so it runs beside the stores; and so does the simulation of a cluster.
PORTABLE_TEST = ($(GO) test -count=1 -timeout 8m -tags portable $(PORTABLE) && $(GO) test -count=1 -run 'Simulation$$' ./presence/member)

# Most of the time of `make test` is CPU time of processes with the race detector. Their
# heaps are small, so they may collect garbage less often, and what has ended need not wait
# a second for races of others: the tests find goroutines that are left.
test: export GOGC   = 400
test: export GORACE = atexit_sleep_ms=0

# Everything, also on a machine that has Go alone: setup installs the rest.
test:
	$(call part,setup,$(MAKE) --no-print-directory setup)
	$(call part,lint,$(MAKE) --no-print-directory lint)
	$(call part,race binary,$(MAKE) --no-print-directory race-binary)
	$(call part,go test,$(RACE_BIN) $(GO) test -count=1 -timeout 12m -p 1 -vet=off $(WHOLE) & whole=$$!; $(RACE_BIN) $(GO) test $(TESTFLAGS) $(OTHERS); status=$$?; wait $$whole && [ $$status = 0 ])
	$(call part,stores,$(PORTABLE_TEST) & portable=$$!; $(GO) test -count=1 -timeout 12m -p 3 -vet=off $$($(GO) list ./... | grep -E '$(SERVED)') -rapid.checks=20; status=$$?; wait $$portable && [ $$status = 0 ])
	$(call part,web test,cd web && $(RACE_BIN) CHROMIUM="$(BROWSER)" npm test)

# The program with the race detector in it, for the tests that run it.
race-binary:
	$(GO) build -race -o bin/headcount-race ./cmd/headcount

# Other releases beside this one, for some minutes. PREVIOUS has the same formats: a
# cluster of it becomes one of this release and goes back, process by process, under
# load. OTHER has other formats, and UNNUMBERED is older than the numbers of formats:
# they and this release refuse each other. Each is a tag or a commit of this repository.
PREVIOUS   = 35ed648
OTHER      = bb5e81f
UNNUMBERED = 86e69d5
upgrade: race-binary
	@dir=$$(mktemp -d) && trap 'rm -rf "$$dir"' EXIT && \
	for release in $(PREVIOUS) $(OTHER) $(UNNUMBERED); do \
		echo "== building $$release" && mkdir "$$dir/src" && git archive "$$release" | tar -x -C "$$dir/src" && \
		(cd "$$dir/src" && $(GO) build -o "$$dir/$$release" ./cmd/headcount) && rm -rf "$$dir/src" || exit 1; \
	done; \
	HEADCOUNT_PREVIOUS="$$dir/$(PREVIOUS)" HEADCOUNT_OTHER_FORMAT="$$dir/$(OTHER)" HEADCOUNT_BEFORE_FORMATS="$$dir/$(UNNUMBERED)" $(RACE_BIN) \
		$(GO) test -tags upgrade -count=1 -timeout 30m -run '^TestUpgrade' -v $(ARGS) ./cmd/headcount/faults

# The whole server, in every scenario: ten minutes on two cores that have
# nothing else to do. It writes BENCHMARKS.md. make bench ARGS='-only fanout'
bench: build
	$(GO) build -o bin/bench ./cmd/bench
	./bin/bench $(ARGS)

# Attacks on servers of its own, with the embedded store and over Redis, on two
# cores that have nothing else to do: half an hour. make hostile ARGS='-only pings'
hostile: build
	$(GO) build -o bin/hostile ./cmd/hostile
	./bin/hostile $(ARGS)
	./bin/hostile -redis $(ARGS)

# Single parts. One iteration of those of cmd/headcount is a run of its own.
microbench:
	$(GO) test -run '^$$' -bench . -benchtime 1x ./cmd/headcount
	$(GO) test -run '^$$' -bench . -benchmem -benchtime $(BENCHTIME) -p 1 $$($(GO) list ./... | grep -v cmd/headcount)

# A million connections that come and go, in every way they do: minutes.
soak:
	$(GO) test -run '^TestSoak$$' -v -timeout 60m ./gateway -soak 1000000

# Every fuzz target for FUZZTIME. The inputs that failed are under testdata.
fuzz:
	@packages=$$($(GO) list ./...) || exit 1; \
	for package in $$packages; do \
		targets=$$($(GO) test -list '^Fuzz' $$package) || exit 1; \
		for target in $$(printf '%s\n' "$$targets" | grep '^Fuzz'); do \
			echo "== $$package $$target"; \
			$(GO) test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) $$package || exit 1; \
		done; \
	done

# The picture on top of the README, of a server with people coming and going.
picture: build setup
	cd web && HEADCOUNT_BIN='$(CURDIR)/bin/headcount' CHROMIUM="$(BROWSER)" SCREENSHOT=demo.png node --test e2e/demo.test.js

# What the machine lacks, then what web/ needs.
setup:
	@sh deploy/setup.sh
	@$(MAKE) --no-print-directory web/node_modules/.package-lock.json

# npm writes this file last, so it is newer than both when all is installed.
web/node_modules/.package-lock.json: web/package.json web/package-lock.json
	cd web && npm ci --no-audit --no-fund
	@touch $@

clean:
	rm -rf bin dist web/node_modules
