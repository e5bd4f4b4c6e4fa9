# The parts of the programs as CycloneDX 1.5, from `cargo metadata`. packaging/build-image gives the variables:
#   $linked     "NAME VERSION" of each crate that is linked, a line each
#   $checksums  "NAME VERSION SHA256" of Cargo.lock, a line each
#   $rust, $libc  versions of Rust's library and of the C library
# Without a serial number: the same programs give the same text.
def lines: split("\n") | map(select(. != ""));
def ref: "pkg:cargo/\(.name)@\(.version)";
# Older manifests write a slash between alternatives.
def licence: if .license then [{expression: (.license | gsub("/"; " OR "))}] else [] end;
($linked | lines | map({key: ., value: true}) | from_entries) as $linked
| ($checksums | lines | map(split(" ") | {key: "\(.[0]) \(.[1])", value: .[2]}) | from_entries) as $checksums
| (.packages | map({key: .id, value: .}) | from_entries) as $packages
| def is_linked: $linked["\(.name) \(.version)"] // false;
{
    bomFormat: "CycloneDX",
    specVersion: "1.5",
    version: 1,
    metadata: {
        timestamp: $created,
        component: {
            type: "application", "bom-ref": "wideleaf", name: "wideleaf", version: $version,
            description: "programs: \($programs)", licenses: [{expression: "Apache-2.0 OR MIT"}]
        }
    },
    components: (
        [.packages[] | select(is_linked) | {
            type: "library", "bom-ref": ref, name, version, purl: ref,
            licenses: licence,
            hashes: ($checksums["\(.name) \(.version)"] | if . then [{alg: "SHA-256", content: .}] else [] end)
        }] + [
            {
                type: "library", "bom-ref": "pkg:generic/rust-std@\($rust)", name: "rust-std", version: $rust,
                purl: "pkg:generic/rust-std@\($rust)", licenses: [{expression: "MIT OR Apache-2.0"}]
            },
            {
                type: "library", "bom-ref": "pkg:generic/glibc@\($libc)", name: "glibc", version: $libc,
                purl: "pkg:generic/glibc@\($libc)", licenses: [{expression: "LGPL-2.1-or-later"}]
            }
        ] | sort_by(.name, .version)
    ),
    dependencies: (
        [.resolve.nodes[] | $packages[.id] as $package | select($package | is_linked) | {
            ref: ($package | ref),
            dependsOn: ([.deps[]
                | select(any(.dep_kinds[]; .kind == null))
                | $packages[.pkg] | select(is_linked) | ref] | unique)
        }] | sort_by(.ref)
    )
}
