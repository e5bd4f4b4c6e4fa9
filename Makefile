# Two commands do everything on a fresh machine (Debian or alike, Rust installed):
#   make demo   builds wideleaf and shows what live promotion does
#   make test   checks formatting, lints, documentation and all tests
# The others: make lab (both labs' tables), make bench, make fuzz (a minute of each target), make build, make deb (a Debian package in
# target/debian).

BIN := target/x86_64-unknown-linux-gnu/release/wideleaf

# Fuzz targets have a workspace of their own. Nothing is linked, so the C++ of libFuzzer need not be built.
FUZZ_CHECK := CUSTOM_LIBFUZZER_PATH=not/linked/libfuzzer.a cargo check --manifest-path fuzz/Cargo.toml --locked --target-dir target

.PHONY: build demo test lab bench fuzz tools deb

build:
	cargo build --release --locked -p wideleaf

demo: build
	@$(BIN) demo

deb:
	@packaging/build-deb

# What the tests run beside Rust. As root it is installed, else it is named.
tools:
	@guest-tests/install-tools

test: tools
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked
	$(FUZZ_CHECK)
	cargo test --workspace --locked --no-fail-fast

# The tables of both labs, from our own binary: real two-dimensional paging in software. Function only. NPT takes two
# minutes, EPT some twenty: Bochs interprets every instruction.
lab: build
	guest-tests/lab/lab npt --timeout 900 --file $(BIN):/bin/wideleaf -- wideleaf doctor --mappings
	guest-tests/lab/lab ept --timeout 3600 --file $(BIN):/bin/wideleaf -- wideleaf doctor --mappings

bench: build
	cargo bench --locked -p wideleaf-benches

fuzz:
	@fuzz/run
