//! The Debian package: its content with permissions, and a run of the unpacked programs.
//!
//! ```text
//!   built programs ─▶ packaging/build-deb ─▶ .deb ─┬─ dpkg-deb --info, --contents, --control
//!                                                  └─ dpkg --unpack into a root of its own ─▶ its programs
//! ```
//!
//! Of the package's scripts only that of a purge runs, with a folder in the place of the machine's.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use wideleaf_testing::programs::built;
use wideleaf_testing::{Need, is_there};

const REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// Standard output of a command that has to succeed.
fn output(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Whether the Debian tools are installed. Prints why not, or fails where `WIDELEAF_REQUIRE` names what is missing.
fn can_run() -> bool {
    let has = |program: &str| {
        let version = Command::new(program).arg("--version").output();
        version.map(drop).map_err(|error| format!("{program}: {error}"))
    };
    is_there(Need::Dpkg, has("dpkg-deb").and(has("dpkg")).and(has("strip")))
}

/// A package of the programs as they are built for tests.
struct Package {
    folder: tempfile::TempDir,
    file: PathBuf,
}

impl Package {
    fn build(name: &str, programs: &[(&str, PathBuf)]) -> Package {
        let folder = tempfile::tempdir().unwrap();
        let binaries = folder.path().join("programs");
        fs::create_dir(&binaries).unwrap();
        programs.iter().for_each(|(program, path)| symlink(path, binaries.join(program)).unwrap());
        // The umask of a user with private files must not become that of the package's files.
        let mut build = Command::new("sh");
        build.args(["-c", "umask 077; exec \"$0\" \"$@\""]).arg(Path::new(REPOSITORY).join("packaging/build-deb"));
        build.args(["--package", name]).arg("--binaries").arg(binaries).arg("--output").arg(folder.path().join("out"));
        // Compression takes longer than everything else together, and does not change the content.
        let file = PathBuf::from(output(build.env("DPKG_DEB_COMPRESSOR_TYPE", "none")).trim());
        Package { folder, file }
    }

    fn ask(&self, question: &str) -> String {
        output(Command::new("dpkg-deb").arg(question).arg(&self.file))
    }

    /// Permissions and owner by path, without folders.
    fn contents(&self) -> BTreeMap<String, String> {
        let contents = self.ask("--contents");
        let line = |line: &str| {
            let words: Vec<&str> = line.split_whitespace().collect();
            let path = words.last()?.strip_prefix("./")?;
            Some((path.to_owned(), format!("{} {}", words[0], words[1])))
        };
        contents.lines().filter_map(line).filter(|(path, _)| !path.ends_with('/') && !path.is_empty()).collect()
    }

    /// A folder with its control files.
    fn control(&self) -> PathBuf {
        let folder = self.folder.path().join("control");
        output(Command::new("dpkg-deb").arg("--control").arg(&self.file).arg(&folder));
        folder
    }

    /// A root into which dpkg has unpacked it, with a libvirt.
    fn unpacked(&self) -> PathBuf {
        let root = self.folder.path().join("root");
        for folder in ["var/lib/dpkg/info", "var/lib/dpkg/updates", "etc/libvirt", "proc"] {
            fs::create_dir_all(root.join(folder)).unwrap();
        }
        fs::write(root.join("var/lib/dpkg/status"), "").unwrap();
        let mut dpkg = Command::new("dpkg");
        dpkg.arg(format!("--root={}", root.display())).args(["--force-not-root", "--force-bad-path", "--unpack"]);
        // A user's PATH may lack /sbin, where dpkg looks for ldconfig and start-stop-daemon.
        output(dpkg.arg(&self.file).env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"));
        root
    }
}

#[test]
fn the_package_is_complete_and_its_programs_run_where_it_is_unpacked() {
    if !can_run() {
        return;
    }
    let programs = [
        ("wideleaf", built(&["build", "-p", "wideleaf"], false)),
        ("wideleafd", env!("CARGO_BIN_EXE_wideleafd").into()),
    ];
    let package = Package::build("wideleaf", &programs);
    every_file_is_there_with_its_rights(&package);
    its_files_have_the_time_of_the_last_commit(&package);
    its_control_files_are_well_formed(&package);
    what_is_unpacked_runs(&package);
    lintian_finds_nothing(&package);
}

fn every_file_is_there_with_its_rights(package: &Package) {
    let contents = package.contents();
    let program = "-rwxr-xr-x root/root";
    let file = "-rw-r--r-- root/root";
    for (path, rights) in [
        ("usr/bin/wideleaf", program),
        ("usr/bin/wideleafd", program),
        ("lib/systemd/system/wideleafd.service", file),
        ("etc/wideleaf/wideleafd.toml", file),
        ("usr/share/bash-completion/completions/wideleaf", file),
        ("usr/share/zsh/vendor-completions/_wideleaf", file),
        ("usr/share/fish/vendor_completions.d/wideleaf.fish", file),
        ("usr/share/doc/wideleaf/README.md", file),
        ("usr/share/doc/wideleaf/CHANGELOG.md.gz", file),
        ("usr/share/doc/wideleaf/changelog.gz", file),
        ("usr/share/man/man8/wideleafd.8.gz", file),
        ("usr/share/doc/wideleaf/copyright", file),
        ("usr/share/doc/wideleaf/libvirt.md", file),
        ("usr/share/doc/wideleaf/grafana.json", file),
        ("usr/share/doc/wideleaf/grafana-fleet.json", file),
        ("usr/share/doc/wideleaf/alerts.yaml", file),
        ("usr/share/doc/wideleaf/examples/wideleaf-hookscript", file),
    ] {
        assert_eq!(contents.get(path).map(String::as_str), Some(rights), "{path}");
    }
    for page in ["wideleaf", "wideleaf-attach", "wideleaf-list", "wideleaf-hook-install"] {
        let path = format!("usr/share/man/man1/{page}.1.gz");
        assert_eq!(contents.get(&path).map(String::as_str), Some(file), "{path}");
    }
    let writable_by_others = contents.iter().find(|(_, rights)| rights.as_bytes()[8] == b'w' || rights.contains('s'));
    assert_eq!(writable_by_others, None);
}

/// None is younger than the last commit, so that the same programs give the same package at any time.
fn its_files_have_the_time_of_the_last_commit(package: &Package) {
    let mut git = Command::new("git");
    let Ok(latest) = git.args(["log", "-1", "--format=%ct"]).current_dir(REPOSITORY).output() else { return };
    let Ok(latest) = String::from_utf8(latest.stdout).unwrap().trim().parse::<u64>() else { return };
    let tar = Command::new("dpkg-deb").arg("--fsys-tarfile").arg(&package.file).output().unwrap().stdout;
    let archive = package.folder.path().join("files.tar");
    fs::write(&archive, tar).unwrap();
    let root = package.folder.path().join("files");
    fs::create_dir(&root).unwrap();
    output(Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(&root));
    let program = fs::metadata(root.join("usr/bin/wideleafd")).unwrap();
    let written = program.modified().unwrap().duration_since(std::time::UNIX_EPOCH).unwrap();
    assert!(written.as_secs() <= latest, "{} after it", written.as_secs() - latest);
}

fn its_control_files_are_well_formed(package: &Package) {
    let control = package.control();
    let version = concat!("Version: ", env!("CARGO_PKG_VERSION"));
    let info = package.ask("--info");
    for line in ["Package: wideleaf", version, "Architecture: amd64", "Section: admin"] {
        assert!(info.lines().any(|told| told.trim() == line), "no {line:?} in\n{info}");
    }
    let conffiles = fs::read_to_string(control.join("conffiles")).unwrap();
    assert_eq!(conffiles, "/etc/wideleaf/wideleafd.toml\n", "what an operator changed is not overwritten");
    for script in ["postinst", "prerm", "postrm"] {
        let path = control.join(script);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o755, "{script}");
        output(Command::new("sh").arg("-n").arg(&path));
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.starts_with("#!/bin/sh\nset -e\n"), "{script}: {text}");
    }
    let says = |script: &str, words: &str| fs::read_to_string(control.join(script)).unwrap().contains(words);
    assert!(says("postinst", "wideleaf hook install") && says("prerm", "wideleaf hook uninstall"));
    a_purge_leaves_nothing_but_locks_in_use(&control.join("postrm"), &package.folder.path().join("purged"));
    // The errors and warnings of lintian, as far as they can be checked without lintian.
    let address = info.lines().find_map(|line| line.trim().strip_prefix("Maintainer: ")).unwrap();
    assert!(address.ends_with('>') && !address.contains("localhost"), "{address}");
    assert!(info.lines().all(|line| line.trim().len() <= 80), "{info}");
    for script in ["postinst", "prerm", "postrm"] {
        let text = fs::read_to_string(control.join(script)).unwrap();
        let is_bad = |line: &&str| {
            line.contains("/usr/bin/wideleaf") || (line.contains("systemctl") && !line.contains("daemon-reload"))
        };
        assert_eq!(text.lines().find(is_bad), None, "{script}");
    }
}

/// Runs the script with `root` in front of its paths.
fn a_purge_leaves_nothing_but_locks_in_use(script: &Path, root: &Path) {
    let (state, sockets, programs) = (root.join("var/lib/wideleaf"), root.join("run/wideleaf"), root.join("programs"));
    for folder in [&state, &sockets, &programs] {
        fs::create_dir_all(folder).unwrap();
    }
    // The machine's own units stay as they are.
    symlink("/bin/true", programs.join("deb-systemd-helper")).unwrap();
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let added = format!(r#"{{"size":"2m","pages":3,"added":[],"boot":"{}"}}"#, boot.trim());
    fs::write(state.join("state.json"), added).unwrap();
    for file in ["control.sock", "metrics.sock", "hook-called", "pool-2m.lock", "pool-1g.making"] {
        fs::write(sockets.join(file), "").unwrap();
    }
    let in_use = fs::File::create(sockets.join("pool-1g.lock")).unwrap();
    in_use.lock().unwrap();
    let mut text = fs::read_to_string(script).unwrap();
    for path in ["/var/lib/wideleaf", "/run/wideleaf"] {
        text = text.replace(path, &format!("{}{path}", root.display()));
    }
    let purge = || {
        let path = format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", programs.display());
        let purged = Command::new("sh").args(["-c", &text, "postrm", "purge"]).env("PATH", path).output().unwrap();
        let said = String::from_utf8(purged.stderr).unwrap();
        assert!(purged.status.success(), "{said}");
        said
    };
    let said = purge();
    assert!(said.contains("3 pages of 2m are in the hugetlb pool for domains"), "{said}");
    let left: Vec<PathBuf> = fs::read_dir(&sockets).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!((left, state.exists()), (vec![sockets.join("pool-1g.lock")], false));
    drop(in_use);
    assert_eq!(purge(), "");
    assert!(!sockets.exists());
}

/// Errors and warnings count, except those about the missing compression of this package.
const LINTIAN: [&str; 3] = [
    "--fail-on=error,warning",
    "--suppress-tags",
    "uses-no-compression-for-control-tarball,uses-no-compression-for-data-tarball",
];

/// `lintian`, where it is installed; the build does not need it.
fn lintian_finds_nothing(package: &Package) {
    let Ok(found) = Command::new("lintian").args(LINTIAN).arg(&package.file).output() else {
        println!("skipped: lintian is not installed");
        return;
    };
    let text = String::from_utf8_lossy(&found.stdout).into_owned() + &String::from_utf8_lossy(&found.stderr);
    assert!(found.status.success(), "{text}");
}

fn the_license_texts_are_in_it(root: &Path) {
    let copyright = fs::read_to_string(root.join("usr/share/doc/wideleaf/copyright")).unwrap();
    for words in
        ["Copyright: 2026 ", "Permission is hereby granted, free of charge", "/usr/share/common-licenses/Apache-2.0"]
    {
        assert!(copyright.contains(words), "no {words:?} in\n{copyright}");
    }
}

fn what_is_unpacked_runs(package: &Package) {
    let root = package.unpacked();
    the_license_texts_are_in_it(&root);
    let status = fs::read_to_string(root.join("var/lib/dpkg/status")).unwrap();
    assert!(status.contains("Status: install ok unpacked"), "{status}");
    let run = |program: &str, arguments: &[&str]| output(Command::new(root.join(program)).args(arguments));
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(run("usr/bin/wideleaf", &["--version"]), format!("wideleaf {version}\n"));
    assert_eq!(run("usr/bin/wideleafd", &["--version"]), format!("wideleafd {version}\n"));
    // dpkg keeps a configuration beside its place until the package is set up.
    let configuration = root.join("etc/wideleaf/wideleafd.toml.dpkg-new");
    run("usr/bin/wideleafd", &["--config", configuration.to_str().unwrap(), "--check"]);
    let unit = fs::read_to_string(root.join("lib/systemd/system/wideleafd.service")).unwrap();
    let started = unit.lines().find_map(|line| line.strip_prefix("ExecStart=/")).unwrap();
    assert!(root.join(started).exists(), "{started}");
    let document = unit.lines().find_map(|line| line.strip_prefix("Documentation=file:/")).unwrap();
    assert!(root.join(document).exists(), "{document}");
    // No hook is installed below a folder that every user can write to, such as one for temporary files.
    let mut install = Command::new(root.join("usr/bin/wideleaf"));
    let installed = install.args(["hook", "install", "--root"]).arg(&root).output().unwrap();
    let (hook, why) = (root.join("etc/libvirt/hooks/qemu.d/wideleaf"), String::from_utf8_lossy(&installed.stderr));
    match installed.status.success() {
        true => assert_eq!(fs::metadata(hook).unwrap().permissions().mode() & 0o111, 0o111, "libvirt runs it"),
        false => assert!(why.contains("install wideleaf where only root can write") && !hook.exists(), "{why}"),
    }
}

#[test]
fn the_laboratory_has_a_package_of_its_own() {
    if !can_run() {
        return;
    }
    let program = built(&["build", "-p", "wideleaf-lab"], false);
    let package = Package::build("wideleaf-lab", &[("wideleaf-lab", program)]);
    let contents = package.contents();
    for path in [
        "usr/bin/wideleaf-lab",
        "usr/share/bash-completion/completions/wideleaf-lab",
        "usr/share/man/man1/wideleaf-lab.1.gz",
        "usr/share/man/man1/wideleaf-lab-experiment-run.1.gz",
        "usr/share/doc/wideleaf-lab/README.md",
        "usr/share/doc/wideleaf-lab/copyright",
    ] {
        assert!(contents.contains_key(path), "no {path} in {contents:?}");
    }
    assert!(!contents.contains_key("usr/bin/wideleaf"), "two packages may not have the same file");
    let version = output(Command::new(package.unpacked().join("usr/bin/wideleaf-lab")).arg("--version"));
    assert_eq!(version, concat!("wideleaf-lab ", env!("CARGO_PKG_VERSION"), "\n"));
    lintian_finds_nothing(&package);
}

#[test]
fn missing_programs_are_an_error_and_give_no_package() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut build = Command::new(Path::new(REPOSITORY).join("packaging/build-deb"));
    build.arg("--binaries").arg(folder.path().join("none")).arg("--output").arg(folder.path().join("out"));
    let output = build.output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), stderr.lines().count()), (Some(4), 1), "{stderr}");
    assert!(stderr.contains("none/wideleaf is not there"), "{stderr}");
    assert!(!folder.path().join("out").exists());
}
