# Two commands are enough on a fresh machine (Debian or similar, with Rust installed):
#   make demo   builds wideleaf and shows the effect of live promotion
#   make test   checks formatting, lints and documentation, and runs all tests
# The others:
#   make check  checks formatting and lints, and runs the tests that need no guest: the short loop
#   make build  builds wideleaf
#   make deb    builds a Debian package in target/debian
#   make image  builds a container image and its list of parts (SBOM) in target/image
#   make lab    the mapping tables and the tests of moving memory, in both labs
#   make fleet-lab  builds a control plane of Kubernetes for this machine and runs all tests of a fleet with it
#   make bench  runs the benchmarks
#   make fuzz   runs each fuzz target for a minute

BIN := target/x86_64-unknown-linux-gnu/release/wideleaf

# Fuzz targets have their own workspace. This check links nothing, so libFuzzer's C++ need not be built.
FUZZ_CHECK := CUSTOM_LIBFUZZER_PATH=not/linked/libfuzzer.a \
	cargo check --manifest-path fuzz/Cargo.toml --locked --target-dir target

.PHONY: build demo check test lab fleet-lab bench fuzz tools deb image

build:
	@guest-tests/install-tools build
	cargo build --release --locked -p wideleaf

demo: build
	@$(BIN) demo

deb:
	@packaging/build-deb
	@packaging/build-deb --package wideleaf-lab

image:
	@packaging/build-image

# Tools that the tests need besides Rust. As root this installs them, otherwise it lists the missing ones.
tools:
	@guest-tests/install-tools

# Formatting, lints, and the tests that need nothing of the machine: unit tests, and those of the programs `hermetic`
# and `house`.
check:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	guest-tests/suite hermetic

test: tools
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked
	$(FUZZ_CHECK)
	guest-tests/suite

# Mapping tables and tests of memory that moves, over real two-dimensional paging in software, on the newest kernel of
# Debian. The labs show function, not speed. A part that fails does not keep the others from running.
lab:
	guest-tests/lab/lab update
	failed=0; \
	guest-tests/lab/run-all npt || failed=1; \
	guest-tests/lab/run-all ept || failed=1; \
	WIDELEAF_REQUIRE=lab cargo test --locked -p wideleaf-guest-tests --test lab -- --ignored || failed=1; \
	exit $$failed

# API server, scheduler and Helm are real, nodes are on paper (docs/fleet-lab.md). One test at a time: some of them
# measure memory and processor time.
fleet-lab: tools
	@fleet/build
	WIDELEAF_REQUIRE=fleet,kvm,qemu cargo test --locked -p wideleaf-fleet --test fleet -- \
		--include-ignored --show-output --test-threads=1

bench: build
	cargo bench --locked -p wideleaf-benches

fuzz:
	@fuzz/run
