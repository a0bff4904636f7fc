# What CI runs is what these targets run: .ci/run calls `make test`, then `make test-all`.

SHELL   := bash
GO      ?= go
ARGS    ?=# make run ARGS='--listen :9000'
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null)
LDFLAGS  = -s -w $(if $(VERSION),-X main.version=$(VERSION))

# Leaves out gin's MessagePack, which nobody uses: to compile it takes 40 CPU s, with the race detector 50.
export GOFLAGS += -tags=nomsgpack
PORTABLE = -tags portable,nomsgpack

.DEFAULT_GOAL := build
.NOTPARALLEL:
.PHONY: build run cluster regions setup lint test test-all rest test-busy mutants upgrade fuzz bench hostile release image chart clean

# part NAME,COMMAND runs one part of a target and says how long it took, and how much CPU time.
part = @printf '\n== %s\n' '$(1)'; TIMEFORMAT='== $(1): %R s, %U user + %S system CPU s'; time { $(2); } || { echo '== $(1): FAILED' >&2; exit 1; }

# Without what debuggers need, which takes a seventh of the compiling. The rest has it, to share its cache with go test.
RACE = -race -gcflags=all=-dwarf=false

# $(call with,-race) COMMAND builds the program, here with the race detector, and tells the tests of the command where it is.
with = $(GO) build $(if $(1),$(RACE)) -o bin/headcount-test$(1) ./cmd/headcount && export HEADCOUNT_BIN='$(CURDIR)/bin/headcount-test$(1)' &&

# $(call beside,A,B) runs B while A runs, and shows what B says when both have ended: browsers mostly wait.
beside = { log=$$(mktemp); { $(2); } >"$$log" 2>&1 & { $(1); }; a=$$?; wait $$!; b=$$?; cat "$$log"; rm -f "$$log"; [ $$a$$b = 00 ]; }

# Four packages at a time, because tests wait more than they compute.
GOTEST = $(GO) test -p 4 -count=1 -vet=off -timeout 20m

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
	$(GO) vet -tags upgrade,nomsgpack ./... headcount/client
	@helpers=$$($(LONG_FUNCTIONS) | grep -vE '^func (Test|(\([^)]*\) )?[a-zA-Z]*Long\()'); [ -z "$$helpers" ] || { echo "-short shortens these helpers: call them ...Long, so that test-all finds the tests: $$helpers" >&2; exit 1; }

# A few minutes on two cores. On a machine that has Go alone, setup installs the rest.
test:
	$(call part,setup,$(MAKE) -s setup)
	$(call part,lint,$(MAKE) -s lint)
	$(call part,go test and web test,$(call with) $(call beside,$(GOTEST) -short ./... headcount/client,npm --prefix web test))

# The test functions that -short leaves out or shortens, and helpers that do, whose names end with Long.
LONG = testing\.Short|Long\(|(counter|presence)test\.Run
LONG_FUNCTIONS = git ls-files '*_test.go' | xargs awk '/^func /{f=$$0} /$(LONG)/{print f}' | sort -u

# The rest: the race detector in every test and process, then in full what -short leaves out or shortens (all set-ups, kill
# loops; the longest package first), then all browser tests beside what else there is.
test-all:
	$(call part,setup,$(MAKE) -s setup)
	$(call part,go test -race,$(call with,-race) $(GOTEST) $(RACE) -short ./... headcount/client)
	$(call part,go test in full,$(call with) $(GOTEST) -run "^($$($(LONG_FUNCTIONS) | sed -nE 's/^func (Test[A-Za-z0-9_]*).*/\1/p' | sort -u | paste -sd '|' -))$$" ./counter/tiered $$(git grep -lE '$(LONG)' '*_test.go' | xargs -n1 dirname | sort -u | sed 's,^,./,'))
	$(call part,the rest and web test:all,$(call beside,$(MAKE) -s rest,$(call with,-race) npm --prefix web run test:all))
rest:
	$(call part,staticcheck,$(GO) tool staticcheck ./... headcount/client)
	$(call part,portable,$(GOTEST) -short $(PORTABLE) ./internal/machine ./gateway ./gateway/socket ./gateway/httppolicy)
	$(call part,upgrade,$(MAKE) -s upgrade)

# test beside two busy loops on each core.
test-busy:
	@trap 'kill $$(jobs -p)' EXIT; for i in $$(seq $$((2 * $$(getconf _NPROCESSORS_ONLN)))); do (while :; do :; done) & done; $(MAKE) test

# Deliberate faults in the most delicate places; a test finds each of them.
mutants:
	$(GO) run ./internal/mutants $(ARGS)

# PREVIOUS is a release that may run beside this one: a cluster of it becomes one of this release and goes back, process by
# process, under load.
PREVIOUS = 817d6cf
upgrade:
	@dir=$$(mktemp -d); trap 'rm -rf "$$dir"' EXIT; git archive $(PREVIOUS) | tar -x -C "$$dir" && \
	(cd "$$dir" && $(GO) build -o previous ./cmd/headcount) && export HEADCOUNT_PREVIOUS="$$dir/previous" && \
	$(call with) $(GO) test -tags upgrade,nomsgpack -count=1 -timeout 30m -parallel 8 -run '^TestClockUpgrade' $(ARGS) ./cmd/headcount/faults

# Every fuzz target for ten seconds. The inputs that failed are under testdata. To minimize an input takes up to a minute by
# default, in which no other is tried.
fuzz:
	@$(GO) list -f '{{.ImportPath}}' ./... headcount/client | while read -r package; do $(GO) test -list '^Fuzz' "$$package" | grep '^Fuzz' | while read -r target; do \
		echo "== $$package $$target"; $(GO) test -run '^$$' -fuzz "^$$target\$$" -fuzztime 10s -fuzzminimizetime 20x $(ARGS) "$$package" || exit; done || exit; done

# Every scenario on the whole program, into BENCHMARKS.md and docs/plots, or one of them to the terminal: make bench ROW=idle,
# and at one size: make bench ROW=idle ARGS='-size 10000'. It wants two cores that have nothing else to do.
bench: build
	$(GO) run ./internal/bench $(if $(ROW),-runs 1 -only $(ROW)) $(ARGS)

# Attacks, with the embedded store and over Redis: half an hour. make hostile ARGS='-only pings'
hostile: build
	$(GO) run ./internal/attack $(ARGS) && $(GO) run ./internal/attack -redis $(ARGS)

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
