# What CI runs is what these targets run: .ci/run calls `make test`, then `make test-all`.

SHELL   := bash
.SHELLFLAGS := -o pipefail -c
GO      ?= go
ARGS    ?=# make run ARGS='--listen :9000'
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null)
LDFLAGS  = -s -w $(if $(VERSION),-X main.version=$(VERSION))

# Leaves out gin's MessagePack, which nobody uses: to compile it takes 40 CPU s, with the race detector 50.
export GOFLAGS += -tags=nomsgpack
PORTABLE = -tags portable,nomsgpack

.DEFAULT_GOAL := build
.NOTPARALLEL:
.PHONY: build run cluster regions setup lint test test-all rest test-busy flaky mutants upgrade fuzz bench hostile histories prove replay soak release image chart clean

# A comma within an argument of call.
, := ,

# part NAME,COMMAND runs one part of a target and says how long it took, and how much CPU time.
part = @printf '\n== %s\n' '$(1)'; TIMEFORMAT='== $(1): %R s, %U user + %S system CPU s'; time { $(2); } || { echo '== $(1): FAILED' >&2; exit 1; }

# A test says in its name what it is: TestServer... has a real server, TestClock... holds a promise in seconds or kills a
# process, every other one is pure. kinds_test.go holds these names.
PURE   = -skip '^Test(Server|Clock)'
SERVER = -run '^TestServer'
CLOCK  = -run '^TestClock'

# Where the product runs as another process or not at all, so that the race detector sees nothing of it.
TOOLS   = ./internal/bench ./internal/browser ./internal/histories ./internal/prove ./internal/testkit
OUTSIDE = ./cmd/headcount/e2e ./cmd/headcount/faults ./cmd/release ./deploy ./internal/models ./internal/servertest . $(TOOLS)
INSIDE  = $$($(GO) list ./... headcount/client | grep -vxF "$$($(GO) list $(OUTSIDE))")

# Of these, packages where something runs at once, in the product or its tests: elsewhere the race detector sees nothing.
AT_ONCE = go [a-z(]|\.Go\(|sync|atomic|http|test\.Start
RACED   = $$($(GO) list -f '{{.ImportPath}} {{.Dir}}' $(INSIDE) | while read -r package dir; do ! grep -qE '$(AT_ONCE)' "$$dir"/*.go || echo "$$package"; done)

# Where tests hold promises in seconds. Those of FAULTS take as long as all others and keep less than one core busy.
FAULTS = ./cmd/headcount/faults
CLOCKS = $$(git grep -lE '^func TestClock' '*_test.go' | xargs -n1 dirname | sort -u | sed 's,^,./,' | grep -vxF $(FAULTS))

# In these one Redis keeps the whole contract of a store.
CONTRACTS = ./counter/cluster ./presence/presenceredis
CONTRACT  = ^TestServerContract$$

# Without what debuggers need, which takes a seventh of the compiling. The rest has it, to share its cache with go test.
RACE = -race -gcflags=all=-dwarf=false

# In these one goroutine works for long: months pass, something becomes full, or spin does the work.
ALONE = ^Test(SimulationFindsPlantedFaults|ServerTracesOf.*|ArchiveReadsLittle|PrunedMap|MemoryOfASum|ExpiredRowsAreSwept|LimitsInMemoryAreBounded|AYearOfPagesTakes50MB|ReservationsDueForLong|DeletionsAreForgotten|DeletedCountersLeaveNoRows)$$

# The programs that tests start read what they tell their clients, and end when that breaks a promise (promises.go).
PROMISES = -tags promises,nomsgpack

# $(with) COMMAND builds the program and tells the tests of the command where it is.
with = $(GO) build $(PROMISES) -o bin/headcount-test ./cmd/headcount && export HEADCOUNT_BIN='$(CURDIR)/bin/headcount-test' &&

# $(call beside,A,B) runs B while A runs, and shows what B says when both have ended: servers and browsers mostly wait. B
# may have two of its own.
beside = { log=$$(mktemp); { $(2); } >"$$log" 2>&1 & { $(1); }; a=$$?; wait $$!; b=$$?; cat "$$log"; rm -f "$$log"; [ $$a$$b = 00 ]; }

# $(call gotest,FLAGS,PACKAGES) runs four packages at a time, because tests wait more than they compute, and $(call
# browsers,SCRIPT) runs a script of web/package.json. Both say how many tests ran in real time.
gotest   = $(GO) test -v -p 4 -count=1 -vet=off -timeout 20m $(1) $(2) 2>&1 | awk -f internal/testkit/ran.awk
browsers = npm --prefix web run -s $(1) 2>&1 | awk -f internal/testkit/ran.awk

build:
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o bin/headcount ./cmd/headcount

run: build
	./bin/headcount serve $(ARGS)

# All roles as processes over one Redis, and three regions, until Ctrl-C.
cluster regions: build
	@HEADCOUNT_BIN=bin/headcount bash deploy/$@.sh $(ARGS)

# What the machine lacks, then what web/ needs.
setup:
	@sh deploy/setup.sh
	@cd web && { [ node_modules/.package-lock.json -nt package-lock.json ] || { npm ci --no-audit --no-fund && touch node_modules/.package-lock.json; }; }

lint:
	@unformatted=$$(gofmt -l $$(git ls-files '*.go')); [ -z "$$unformatted" ] || { echo "run gofmt -w on: $$unformatted" >&2; exit 1; }
	$(GO) vet -tags upgrade,promises,nomsgpack ./... headcount/client

# A few minutes on two cores. On a machine that has Go alone, setup installs the rest.
test:
	$(call part,setup,$(MAKE) -s setup)
	$(call part,lint,$(MAKE) -s lint)
	$(call part,pure tests$(,) the front door$(,) contracts,$(with) $(call beside,\
		$(call gotest,$(PURE),./... headcount/client) && npm --prefix web run -s test:pure,\
		$(call browsers,test:smoke) && $(call gotest,$(SERVER),./cmd/headcount/e2e) && $(call gotest,-run '$(CONTRACT)',$(CONTRACTS))))

# What is left: the race detector where goroutines of the product are in the test's own process, the other servers and
# browsers without it, all at once since they promise nothing in seconds. At the end the promises in seconds, in two rows of
# one package after the other, and the rest in the CPU time that these leave. With -short a test has fewer random histories;
# make test had all of them.
test-all:
	$(call part,setup,$(MAKE) -s setup)
	$(call part,race detector$(,) servers and browsers,$(with) $(call beside,\
		$(call gotest,$(RACE) -p 3 -short -skip '^TestClock|$(CONTRACT)|$(ALONE)',$(RACED)),\
		$(call beside,$(call gotest,$(SERVER),./counter/call ./deploy ./internal/rows/rowstier ./internal/servertest),$(call browsers,test:server))))
	$(call part,clocks$(,) upgrade and the rest,$(with) $(call beside,\
		$(call gotest,$(CLOCK) -parallel 6,$(FAULTS)) && $(MAKE) -s upgrade,\
		$(call beside,\
			$(call gotest,$(CLOCK) -p 1 -parallel 6,$(CLOCKS)) && $(call browsers,test:clock),\
			nice -n 19 $(MAKE) -s rest)))
rest:
	$(call part,models$(,) release$(,) documents,$(call gotest,$(SERVER),./internal/models ./cmd/release .))
	$(call part,staticcheck,$(GO) tool staticcheck ./... headcount/client)
	$(call part,portable,$(call gotest,$(PURE) $(PORTABLE),./internal/machine ./gateway ./gateway/httppolicy ./gateway/socket))

# busy COMMAND runs a command beside two busy loops on each core.
busy = trap 'kill $$(jobs -p)' EXIT; for i in $$(seq $$((2 * $$(getconf _NPROCESSORS_ONLN)))); do (while :; do :; done) & done;

# test beside busy loops.
test-busy:
	@$(busy) $(MAKE) test

# What changed since a commit, or the tests of named packages, N times beside busy loops, and how often each test failed:
# make flaky N=20 SINCE=v1.2.3, make flaky PKG=./unread TESTS=Sum. A new or changed TestClock passes it twenty times.
N     = 20
SINCE = HEAD~1
flaky:
	@$(busy) $(with) N=$(N) SINCE='$(SINCE)' PKG='$(PKG)' TESTS='$(TESTS)' bash internal/testkit/flaky.sh

# Deliberate faults in the most delicate places; a test finds each of them.
mutants:
	$(GO) run ./internal/mutants $(ARGS)

# PREVIOUS is a release that may run beside this one: a cluster of it becomes one of this release and goes back, process by
# process, under load.
PREVIOUS = 817d6cf
UPGRADE  = -tags upgrade,nomsgpack -timeout 30m -parallel 8 -run '^TestClockUpgrade'
upgrade:
	@dir=$$(mktemp -d); trap 'rm -rf "$$dir"' EXIT; git archive $(PREVIOUS) | tar -x -C "$$dir" && \
	(cd "$$dir" && $(GO) build -o previous ./cmd/headcount) && export HEADCOUNT_PREVIOUS="$$dir/previous" && \
	$(GO) build $(PROMISES) -o "$$dir/headcount" ./cmd/headcount && export HEADCOUNT_BIN="$$dir/headcount" && \
	$(call gotest,$(UPGRADE) $(ARGS),./cmd/headcount/faults)

# Every fuzz target for ten seconds. The inputs that failed are under testdata. To minimize an input takes up to a minute by
# default, in which no other is tried.
fuzz:
	@$(GO) list -f '{{.ImportPath}}' ./... headcount/client | while read -r package; do $(GO) test -list '^Fuzz' "$$package" | grep '^Fuzz' | while read -r target; do \
		echo "== $$package $$target"; $(GO) test -run '^$$' -fuzz "^$$target\$$" -fuzztime 10s -fuzzminimizetime 20x $(ARGS) "$$package" || exit; done || exit; done

# Every scenario on the whole program, into BENCHMARKS.md and docs/plots, or one of them to the terminal: make bench ROW=idle,
# and at one size: make bench ROW=idle ARGS='-size 10000'. Rows beside-... need the Go modules of internal/bench/beside.
# It wants two cores that have nothing else to do.
bench: build
	$(GO) run ./internal/bench $(if $(ROW),-runs 1 -only $(ROW)) $(ARGS)

# Attacks, with the embedded store and over Redis: half an hour. make hostile ARGS='-only pings'
hostile: build
	$(GO) run ./internal/attack $(ARGS) && $(GO) run ./internal/attack -redis $(ARGS)

# What clients saw while processes and stores die, judged by a checker that is not ours. SETTING is memory, file, redis, tier,
# postgres, regions, sentinel, where a replica takes over, and redis-forgets and tier-forgets, where Redis comes back empty or
# older. make test-all has two faults of it.
SETTING = redis
OPS     = 100000
histories:
	@$(with) $(GO) test ./cmd/headcount/faults -run '^TestClockHistories$$' -count 1 -v -timeout 24h -setting $(SETTING) -ops $(OPS) $(ARGS)

# Simulated hours of presence, counters and regions with fresh seeds, about a thousand in an hour on two cores. It fails at
# the first seed that breaks a promise, which it shrinks, and when a marked place (internal/marks) was never reached.
HOURS = 10
prove:
	$(GO) run ./internal/prove -hours $(HOURS) $(ARGS)

# One seed of a simulation again, with its trace: the same command has the same trace. Without ORDER it tries some orders of
# goroutines until a promise is broken, and then leaves out what faults it can. make replay SIM=presence/member SEED=17
SIM     = counter/call
SEED    = 1
ORDER   = -1
WITHOUT =
replay:
	@$(GO) run ./internal/prove -replay $(SIM) -seed $(SEED) -order $(ORDER) -without '$(WITHOUT)' $(ARGS)

# Real processes over one Redis for so many HOURS (0.5 is half of one), under load and with a kill each minute: what is
# counted is exact, and from the tenth minute to the last nothing grows by more than 5 %. make test-all has one minute of it.
soak:
	@$(with) $(GO) test ./cmd/headcount/faults -run '^TestClockSoak$$' -count 1 -v -timeout 0 -hours $(HOURS) $(ARGS)

# Archives and packages with checksums and lists of modules, in dist/, and a container image: make release VERSION=v1.2.3
release:
	$(GO) run ./cmd/release -version '$(VERSION)'
image:
	docker build --build-arg VERSION='$(VERSION)' -t headcount:'$(VERSION)' .

# The real Helm on the chart, with each set of values. It takes minutes to compile, so the tests render the chart themselves.
HELM = $(GO) run helm.sh/helm/v3/cmd/helm@v3.22.0
chart:
	@for values in deploy/helm/ci/*.yaml; do $(HELM) lint --strict --kube-version 1.30.0 -f $$values deploy/helm && \
		$(HELM) template --kube-version 1.30.0 -f $$values headcount deploy/helm >/dev/null || exit; done

clean:
	rm -rf bin dist web/node_modules
