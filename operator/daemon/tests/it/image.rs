//! The container image and its list of parts (SBOM).
//!
//! ```text
//!   built programs ─▶ packaging/build-image ─┬─▶ .oci.tar ─▶ index, manifest, configuration, layer ─▶ its programs
//!                                            └─▶ .cdx.json ◀─▶ `cargo metadata`, Cargo.lock
//! ```
//!
//! No container engine takes part.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use wideleaf_testing::programs::built;
use wideleaf_testing::{Need, is_there};

const REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// Whether the tools are installed. Prints why not, or fails where `WIDELEAF_REQUIRE` names them.
fn can_run() -> bool {
    let has = |program: &str| {
        let version = Command::new(program).arg("--version").output();
        version.map(drop).map_err(|error| format!("{program}: {error}"))
    };
    is_there(Need::Image, ["tar", "gzip", "jq", "strip", "sha256sum"].into_iter().try_for_each(has))
}

fn output(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// A folder with the programs as they are built for tests.
struct Built {
    folder: tempfile::TempDir,
}

impl Built {
    fn new() -> Built {
        let folder = tempfile::tempdir().unwrap();
        let programs = [
            ("wideleaf", built(&["build", "-p", "wideleaf", "--bin", "wideleaf"], false)),
            ("wideleafd", PathBuf::from(env!("CARGO_BIN_EXE_wideleafd"))),
        ];
        programs.iter().for_each(|(name, path)| symlink(path, folder.path().join(name)).unwrap());
        Built { folder }
    }

    fn run(&self, programs: &str, into: &str, epoch: &str, more: &[&str]) -> Output {
        let mut build = Command::new(Path::new(REPOSITORY).join("packaging/build-image"));
        build.args(["--programs", programs]).args(more).arg("--binaries").arg(self.folder.path());
        // Compression takes longer than everything else together, and does not change the content.
        build.env("SOURCE_DATE_EPOCH", epoch).env("WIDELEAF_GZIP", "1");
        build.arg("--output").arg(self.folder.path().join(into)).output().unwrap()
    }

    /// Paths of the image and of the SBOM.
    fn image(&self, programs: &str, into: &str, epoch: &str) -> (PathBuf, PathBuf) {
        self.named_image(programs, into, epoch, &[])
    }

    /// The same with more options.
    fn named_image(&self, programs: &str, into: &str, epoch: &str, more: &[&str]) -> (PathBuf, PathBuf) {
        let output = self.run(programs, into, epoch, more);
        let (stdout, stderr) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{stderr}");
        let mut paths = stdout.lines().map(PathBuf::from);
        (paths.next().unwrap(), paths.next().unwrap())
    }
}

/// An unpacked archive.
struct Layout {
    folder: PathBuf,
}

impl Layout {
    fn unpack(archive: &Path, into: PathBuf) -> Layout {
        fs::create_dir(&into).unwrap();
        output(Command::new("tar").arg("-xf").arg(archive).arg("-C").arg(&into));
        Layout { folder: into }
    }

    fn json(&self, path: &str) -> Value {
        serde_json::from_slice(&fs::read(self.folder.join(path)).unwrap()).unwrap()
    }

    /// Path of what a descriptor names, once its digest and size are right.
    fn checked(&self, descriptor: &Value) -> String {
        let digest = descriptor["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap();
        let path = format!("blobs/sha256/{digest}");
        let file = self.folder.join(&path);
        assert_eq!(output(Command::new("sha256sum").arg(&file)).split(' ').next(), Some(digest));
        assert_eq!(descriptor["size"], fs::metadata(&file).unwrap().len());
        path
    }
}

#[test]
fn the_image_unpacks_and_its_programs_run() {
    if !can_run() {
        return;
    }
    let built = Built::new();
    let (archive, sbom) = built.image("wideleaf wideleafd", "out", "1700000000");
    let layout = Layout::unpack(&archive, built.folder.path().join("layout"));
    assert_eq!(layout.json("oci-layout")["imageLayoutVersion"], "1.0.0");
    let index = layout.json("index.json");
    let manifest = layout.json(&layout.checked(&index["manifests"][0]));
    let config_path = layout.checked(&manifest["config"]);
    let layer = layout.checked(&manifest["layers"][0]);
    let config = layout.json(&config_path);
    assert_eq!((&config["os"], &config["architecture"]), (&"linux".into(), &"amd64".into()));
    assert_eq!(config["created"], "2023-11-14T22:13:20Z");
    let docker = layout.json("manifest.json");
    assert_eq!((&docker[0]["Config"], &docker[0]["Layers"][0]), (&config_path.into(), &layer.as_str().into()));
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(docker[0]["RepoTags"][0], format!("wideleaf:{version}"));

    // The digest of the plain layer is what an engine compares after it has unpacked it.
    let plain = built.folder.path().join("layer.tar");
    let layer = layout.folder.join(layer);
    fs::write(&plain, Command::new("gzip").arg("-dc").arg(&layer).output().unwrap().stdout).unwrap();
    let digest = output(Command::new("sha256sum").arg(&plain));
    assert_eq!(config["rootfs"]["diff_ids"][0], format!("sha256:{}", digest.split(' ').next().unwrap()));

    let root = built.folder.path().join("root");
    fs::create_dir(&root).unwrap();
    output(Command::new("tar").arg("-xf").arg(&plain).arg("-C").arg(&root));
    for program in ["wideleaf", "wideleafd"] {
        let path = root.join("usr/bin").join(program);
        assert_eq!(output(Command::new(&path).arg("--version")), format!("{program} {version}\n"));
    }
    let entry = config["config"]["Entrypoint"][0].as_str().unwrap();
    assert!(root.join(entry.trim_start_matches('/')).exists(), "{entry}");
    // wideleafd looks its socket's group up in these files.
    let group = fs::read_to_string(root.join("etc/group")).unwrap();
    assert!(group.contains("wideleaf:x:64177:wideleaf\n"), "{group}");
    let listed = output(Command::new("tar").arg("--numeric-owner").arg("-tvf").arg(&plain));
    assert!(listed.lines().all(|line| line.contains(" 0/0 ")), "{listed}");
    let in_image = fs::read(root.join("usr/share/doc/wideleaf/wideleaf.cdx.json")).unwrap();
    assert_eq!(fs::read(sbom).unwrap(), in_image);
}

#[test]
fn two_builds_are_equal_and_another_time_gives_another_image() {
    if !can_run() {
        return;
    }
    let built = Built::new();
    let [first, again, later] = [("first", "1"), ("again", "1"), ("later", "2")].map(|(into, epoch)| {
        let (archive, sbom) = built.image("wideleafd", into, epoch);
        (fs::read(archive).unwrap(), fs::read(sbom).unwrap())
    });
    assert!(first == again, "two builds of the same programs differ");
    assert!(first.0 != later.0 && first.1 != later.1, "the time is in neither");
}

#[test]
fn an_image_has_a_tag_and_for_containerd_a_name_with_its_registry() {
    if !can_run() {
        return;
    }
    let built = Built::new();
    let version = env!("CARGO_PKG_VERSION");
    for (into, name, in_docker, in_containerd) in [
        ("plain", None, "wideleaf", "docker.io/library/wideleaf"),
        ("port", Some("registry:5000/wideleaf"), "registry:5000/wideleaf", "registry:5000/wideleaf"),
    ] {
        let more: Vec<&str> = name.into_iter().flat_map(|name| ["--tag", name]).collect();
        let (archive, _) = built.named_image("wideleafd", into, "1", &more);
        let layout = Layout::unpack(&archive, built.folder.path().join(format!("{into}-layout")));
        let annotations = &layout.json("index.json")["manifests"][0]["annotations"];
        assert_eq!(annotations["org.opencontainers.image.ref.name"], version);
        assert_eq!(annotations["io.containerd.image.name"], format!("{in_containerd}:{version}"));
        assert_eq!(layout.json("manifest.json")[0]["RepoTags"][0], format!("{in_docker}:{version}"));
    }
}

/// Names with versions of crates that may be linked into these packages: what is behind normal dependencies, without
/// what runs in the compiler. A dependency of a feature that another package asks for is among them too.
fn reachable(metadata: &Value, roots: &[&str]) -> BTreeSet<String> {
    let packages: BTreeMap<&str, &Value> =
        metadata["packages"].as_array().unwrap().iter().map(|of| (of["id"].as_str().unwrap(), of)).collect();
    let nodes = metadata["resolve"]["nodes"].as_array().unwrap();
    let nodes: BTreeMap<&str, &Value> = nodes.iter().map(|node| (node["id"].as_str().unwrap(), node)).collect();
    let runs_in_compiler =
        |package: &Value| package["targets"].as_array().unwrap().iter().any(|target| target["kind"][0] == "proc-macro");
    let mut names = BTreeSet::new();
    let is_root = |package: &Value| roots.contains(&package["name"].as_str().unwrap());
    let mut to_do: Vec<&str> = packages.iter().filter(|(_, package)| is_root(package)).map(|(id, _)| *id).collect();
    while let Some(id) = to_do.pop() {
        let package = packages[id];
        let name = format!("{} {}", package["name"].as_str().unwrap(), package["version"].as_str().unwrap());
        if runs_in_compiler(package) || !names.insert(name) {
            continue;
        }
        for dependency in nodes[id]["deps"].as_array().unwrap() {
            if dependency["dep_kinds"].as_array().unwrap().iter().any(|kind| kind["kind"].is_null()) {
                to_do.push(dependency["pkg"].as_str().unwrap());
            }
        }
    }
    names
}

fn names_in(sbom: &Value, prefix: &str) -> BTreeSet<String> {
    let components = sbom["components"].as_array().unwrap().iter();
    let of = components.filter(|of| of["purl"].as_str().unwrap().starts_with(prefix));
    of.map(|of| format!("{} {}", of["name"].as_str().unwrap(), of["version"].as_str().unwrap())).collect()
}

#[test]
fn the_sbom_names_each_crate_that_is_linked_with_licence_and_checksum() {
    if !can_run() {
        return;
    }
    let built = Built::new();
    let (_, sbom) = built.image("wideleaf wideleafd", "out", "1");
    let sbom: Value = serde_json::from_slice(&fs::read(sbom).unwrap()).unwrap();
    assert_eq!((&sbom["bomFormat"], &sbom["specVersion"]), (&"CycloneDX".into(), &"1.5".into()));
    let listed = names_in(&sbom, "pkg:cargo/");
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["metadata", "--locked", "--offline", "--format-version=1"]).current_dir(REPOSITORY);
    let metadata = output(cargo.arg("--filter-platform=x86_64-unknown-linux-gnu"));
    let metadata: Value = serde_json::from_str(&metadata).unwrap();
    let may_be = reachable(&metadata, &["wideleaf", "wideleaf-daemon"]);
    assert_eq!(listed.difference(&may_be).collect::<Vec<_>>(), [""; 0], "not linked");
    // A crate is left out only if every crate that names it does so for a feature that is off: it is optional there.
    let is_optional = |missing: &str| {
        let name = missing.split(' ').next().unwrap();
        let packages = metadata["packages"].as_array().unwrap().iter();
        let linked = packages.filter(|of| {
            listed.contains(&format!("{} {}", of["name"].as_str().unwrap(), of["version"].as_str().unwrap()))
        });
        let mut named = linked.flat_map(|of| of["dependencies"].as_array().unwrap());
        named.all(|of| of["name"] != name || !of["kind"].is_null() || of["optional"] == true || !of["target"].is_null())
    };
    let forgotten: Vec<&String> = may_be.difference(&listed).filter(|missing| !is_optional(missing)).collect();
    assert_eq!(forgotten, Vec::<&String>::new(), "linked, and not in the SBOM");
    // The guest that is inside of `wideleaf` has a lock file of its own.
    let inside = fs::read_to_string(Path::new(REPOSITORY).join("guests/image/freestanding/Cargo.lock")).unwrap();
    let inside: toml::Table = inside.parse().unwrap();
    for package in inside["package"].as_array().unwrap().iter().filter(|package| package.get("source").is_some()) {
        let name = format!("{} {}", package["name"].as_str().unwrap(), package["version"].as_str().unwrap());
        assert!(listed.contains(&name), "{name} is inside of the guest, and not in the SBOM");
    }
    let lock = fs::read_to_string(Path::new(REPOSITORY).join("Cargo.lock")).unwrap();
    let lock: toml::Table = lock.parse().unwrap();
    let checksums: BTreeMap<String, String> = lock["package"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|package| {
            let name = format!("{} {}", package["name"].as_str()?, package["version"].as_str()?);
            Some((name, package.get("checksum")?.as_str()?.to_owned()))
        })
        .collect();
    for component in sbom["components"].as_array().unwrap() {
        let name = format!("{} {}", component["name"].as_str().unwrap(), component["version"].as_str().unwrap());
        assert!(component["licenses"][0]["expression"].is_string(), "{component}");
        let hash = component["hashes"][0]["content"].as_str();
        assert_eq!(hash, checksums.get(&name).map(String::as_str), "{name}");
    }
    assert_eq!(names_in(&sbom, "pkg:generic/").len(), 2, "the libraries of Rust and C");
}

#[test]
fn missing_or_unknown_programs_are_an_error_and_give_no_image() {
    if !can_run() {
        return;
    }
    let built = Built::new();
    for (programs, code, words) in [("wideleafd wideleaf-node", 4, "wideleaf-node is not there"), ("vi", 2, "unknown")]
    {
        let output = built.run(programs, "out", "1", &[]);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), stderr.lines().count()), (Some(code), 1), "{stderr}");
        assert!(stderr.contains(words), "{stderr}");
        assert!(!built.folder.path().join("out").exists());
    }
}
