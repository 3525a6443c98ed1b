# The front door. Each target says what it does and needs nothing but the Rust toolchain, a C compiler and make.
#
# One profile (dev) and one feature set (fakehw) everywhere: another combination would build the world again.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

FEATURES := --features fakehw --locked
TARGET := $(or $(CARGO_TARGET_DIR),target)
BCD := $(TARGET)/debug/bcd

# Options of `bcd sim`, as in: make sim SIM="--nodes 200 --seed 7 --duration 60s"
SIM ?= --nodes 50 --duration 20s --seed 1
# Kills of a node at named steps in `make crash`; about half as many of others come on top. Then at least so many of joins,
# renewals and re-joins.
N ?= 1000
E ?= 300

# Where the benches write: a directory on a disk, not in memory. Each makes one of its own in it, and removes it.
BENCH_STATE ?= $(TARGET)/bench
# Options of `bcd bench agent`, as in: make bench AGENT="--duration 1h --program target/dist/bcd"
AGENT ?= --duration 2m --nodes 1000

.PHONY: help tools build test check sim bench bench-build bench-check crash fuzz flood bless cargodeb deb test-systemd

help: ## this list
	@echo "bcd: make TARGET"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16

# rustup's cargo fetches the pinned toolchain (rust-toolchain.toml) by itself on its first call.
tools:
	@command -v cargo >/dev/null || { \
	  echo "make: cargo is missing; install the Rust toolchain: https://rustup.rs, then open a new shell" >&2; exit 1; }
	@command -v cc >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null || { \
	  echo "make: no C compiler (SQLite and ring are built from source); on Debian: apt install gcc libc6-dev" >&2; exit 1; }

build: tools ## build target/debug/bcd with the simulator and the reference gateway
	cargo build $(FEATURES)

sim: tools ## run real agents against the reference gateway under faults, and check the invariants (SIM="…" for options)
	cargo build $(FEATURES) --bin bcd
	$(BCD) sim $(SIM)

test: tools ## run every test
	@if cargo nextest --version >/dev/null 2>&1; then \
	  echo "cargo nextest run $(FEATURES)"; cargo nextest run $(FEATURES); \
	else \
	  echo "cargo-nextest is not installed: using cargo test (same tests, slower)"; \
	  cargo test $(FEATURES); \
	fi

check: tools ## formatting, lints, the production build, dependencies, borders and docs
	cargo fmt --check
	cargo clippy $(FEATURES) --all-targets -- -D warnings
	cargo clippy --locked -- -D warnings
	@if command -v cargo-deny >/dev/null; then \
	  echo "cargo deny check bans licenses sources"; cargo deny check bans licenses sources; \
	else \
	  echo "cargo-deny is not installed: licences are not checked (bans and sources are, by a test over Cargo.lock)"; \
	fi
	cargo test $(FEATURES) --test it -- borders:: dependencies:: docs::

# Ratios of a program that is not optimised say nothing of the one that is given away.
bench-build: tools
	cargo build --release $(FEATURES) --bin bcd
	mkdir -p $(BENCH_STATE)

bench: bench-build ## what the node costs, each figure a ratio with its aim (docs/performance.md; minutes)
	@for bench in "journal" "session" "agent $(AGENT)"; do \
	  echo "bcd bench $$bench"; $(TARGET)/release/bcd bench $$bench --state $(BENCH_STATE) || [ $$? = 2 ]; \
	done

bench-check: bench-build ## the figures that hold on a noisy machine: counts exactly, ratios at 1.15 times their aim
	$(TARGET)/release/bcd bench journal --state $(BENCH_STATE) --check
	$(TARGET)/release/bcd bench session --state $(BENCH_STATE) --check

crash: tools ## kill -9 the real binary N times at random steps, programs in flight, and E times in joins and renewals (N=1000 E=300)
	BCD_CRASH_KILLS=$(N) BCD_CRASH_ENROLMENTS=$(E) cargo test $(FEATURES) --test it -- \
	  crash::random crash::enrolment::kills --nocapture --test-threads 1

# Seconds of `make fuzz` for each target.
SECONDS ?= 600

fuzz: tools ## hostile bytes against every parser of what a peer sends, each for SECONDS=600 (docs/decisions/0096-hostile-bytes.md)
	BCD_FUZZ_SECONDS=$(SECONDS) cargo test $(FEATURES) --test fuzz -- --nocapture

flood: tools ## a program that writes 10 GiB: bounded memory and disk, and the true result (a minute)
	cargo test $(FEATURES) --lib -- --ignored --exact \
	  exec::supervise::tests::a_flood_of_10_gib_grows_no_memory_fits_the_result_and_reaches_no_disk

# Pinned: the packages that it makes are held by tests/systemd and by lintian. Its own build is a debug one: seconds of
# packing, against minutes of optimising.
CARGO_DEB := 3.8.0
cargodeb: tools
	@command -v dpkg-deb >/dev/null || { \
	  echo "make: dpkg-deb is missing (a Debian package is checked with it); on Debian: apt install dpkg" >&2; exit 1; }
	@cargo deb --version 2>/dev/null | grep -q '$(subst .,\.,$(CARGO_DEB))' || { \
	  echo "cargo-deb $(CARGO_DEB) is not installed: building it"; \
	  cargo install --locked --debug --version $(CARGO_DEB) cargo-deb; }

deb: cargodeb ## the Debian package of the production build, in target/debian (minutes: everything is optimised as one)
	cargo build --profile dist --locked --bin bcd
	rm -rf target/package && $(TARGET)/dist/bcd package-files target/package
	cargo deb --no-build --profile dist
	@if command -v lintian >/dev/null; then \
	  echo "lintian --pedantic target/debian/bcd_*.deb"; lintian --pedantic --fail-on error,warning,info,pedantic target/debian/bcd_*.deb; \
	else \
	  echo "lintian is not installed: the package is not checked; on Debian: apt install lintian"; \
	fi

# The simulation build in a package, never to be given away: the container's gateway is in it.
test-systemd: build cargodeb ## install, join, restart, kill, reboot, purge under a real systemd in a container (root)
	rm -rf target/package && $(BCD) package-files target/package
	cargo deb --quiet --no-build --profile dev --fast --strip -o target/systemd/bcd.deb
	tests/systemd/run.sh target/systemd/bcd.deb

bless: tools ## write docs/errors.md again from the tables in the code
	BLESS=1 cargo test $(FEATURES) --test it -- docs::
