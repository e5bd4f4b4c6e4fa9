//! The Ansible role, on a host of its own: this machine's files with changes in memory, processes and a loopback of its
//! own, and a stand-in for `systemctl` that starts the real daemon.
//!
//! ```text
//!   built programs ─▶ packaging/build-deb ─▶ .deb ─┐
//!   unshare ─▶ hold.sh ─▶ an overlay of / ◀── nsenter ── ansible-playbook (the role, the upgrade)
//! ```
//!
//! When the test ends, so does the host with all that runs on it.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use nix::unistd::Uid;
use wideleaf_testing::programs::built;
use wideleaf_testing::{Need, is_there};

const REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
const HERE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/ansible");
const CONFIGURED: &str = r#"{"wideleaf_config": {"budget": {"cpu_share": "25%"}, "attach": {"automatic": "all"}},
    "wideleaf_vms": [{"name": "db*", "guarantee": "95%", "weight": 2}, {"flavor": "m1.*", "policy": "off"}]}"#;

/// File that brings pages of 2 MiB back after a boot.
const KEPT: &str = "/etc/tmpfiles.d/wideleaf.conf";

/// A host with files, processes and a loopback of its own.
struct Host {
    holder: Child,
    /// Process in the host, for nsenter(1).
    inside: u32,
    folder: tempfile::TempDir,
}

/// Part of Ansible's recap for one host.
#[derive(Debug, PartialEq, Eq)]
struct Recap {
    changed: u32,
    failed: u32,
}

impl Host {
    /// Starts a host that sees the files of `folder`.
    fn start(folder: tempfile::TempDir) -> Result<Host, String> {
        let root = folder.path().join("host");
        fs::create_dir(&root).unwrap();
        let mut holder = Command::new("unshare");
        holder.args(["--mount", "--pid", "--net", "--fork", "--kill-child"]);
        holder.arg(Path::new(HERE).join("hold.sh")).arg(root).arg(Path::new(HERE).join("systemctl"));
        holder.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut holder = holder.spawn().map_err(|error| format!("unshare: {error}"))?;
        let mut line = String::new();
        BufReader::new(holder.stdout.take().unwrap()).read_line(&mut line).unwrap();
        if line != "ready\n" {
            let output = holder.wait_with_output().unwrap();
            return Err(format!("hold.sh: {}", String::from_utf8_lossy(&output.stderr).trim()));
        }
        let pid = holder.id();
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
        Ok(Host { inside: children.trim().parse().unwrap(), holder, folder })
    }

    fn run(&self, program: &str, arguments: &[&str]) -> Output {
        let mut inside = Command::new("nsenter");
        inside.arg(format!("--target={}", self.inside)).args(["--mount", "--pid", "--net", "--root", "--wd"]);
        inside.arg(program).args(arguments).stdin(Stdio::null()).env("ANSIBLE_NOCOLOR", "1").env("LC_ALL", "C.UTF-8");
        inside.env("ANSIBLE_ROLES_PATH", Path::new(REPOSITORY).join("packaging/ansible/roles"));
        inside.env("ANSIBLE_LOCALHOST_WARNING", "false").env("ANSIBLE_RETRY_FILES_ENABLED", "false");
        inside.env("ANSIBLE_LOCAL_TEMP", "/run/ansible").env("ANSIBLE_REMOTE_TEMP", "/run/ansible");
        inside.output().unwrap()
    }

    fn says(&self, program: &str, arguments: &[&str]) -> String {
        let output = self.run(program, arguments);
        assert!(output.status.success(), "{program} {arguments:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn has(&self, path: &str) -> bool {
        self.run("test", &["-e", path]).status.success()
    }

    /// Whether the daemon answers.
    fn answers(&self) -> bool {
        self.run("wideleaf", &["list", "--socket", "/run/wideleaf/control.sock"]).status.success()
    }

    /// Runs a playbook on hosts of these names, which all are this one, and returns its output.
    fn playbook_on(&self, hosts: &[&str], playbook: &Path, arguments: &[&str]) -> String {
        let inventory = hosts.join(",") + ",";
        let mut all = vec!["--connection", "local", "--inventory", &inventory];
        all.extend(["--extra-vars", "ansible_python_interpreter=/usr/bin/python3"]);
        all.extend(arguments);
        all.push(playbook.to_str().unwrap());
        let output = self.run("ansible-playbook", &all);
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
    }

    fn site(&self, arguments: &[&str]) -> (Recap, String) {
        let said = self.playbook_on(&["here"], &Path::new(HERE).join("site.yml"), arguments);
        (recap(&said, "here").unwrap_or_else(|| panic!("no recap in\n{said}")), said)
    }

    /// A run that has to succeed, and its number of changes.
    fn changes(&self, arguments: &[&str]) -> u32 {
        let (recap, said) = self.site(arguments);
        assert_eq!(recap.failed, 0, "{said}");
        recap.changed
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // Its first process ends with its input, and all others with that one.
        drop(self.holder.stdin.take());
        let _ = self.holder.wait();
    }
}

/// The recap of one host: `here : ok=9 changed=3 unreachable=0 failed=0 …`.
fn recap(said: &str, host: &str) -> Option<Recap> {
    let of_host = |line: &&str| line.split_whitespace().next() == Some(host) && line.contains("changed=");
    let line = said.lines().rev().find(of_host)?;
    let number =
        |name: &str| line.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('=')?.parse().ok());
    Some(Recap { changed: number("changed")?, failed: number("failed")? + number("unreachable")? })
}

/// A package of the programs as they are built for tests, in this folder.
fn package(folder: &Path) -> PathBuf {
    let binaries = folder.join("programs");
    fs::create_dir(&binaries).unwrap();
    symlink(built(&["build", "-p", "wideleaf", "--bin", "wideleaf"], false), binaries.join("wideleaf")).unwrap();
    symlink(env!("CARGO_BIN_EXE_wideleafd"), binaries.join("wideleafd")).unwrap();
    let mut build = Command::new(Path::new(REPOSITORY).join("packaging/build-deb"));
    build.arg("--binaries").arg(binaries).arg("--output").arg(folder).env("DPKG_DEB_COMPRESSOR_TYPE", "none");
    let output = build.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    PathBuf::from(String::from_utf8(output.stdout).unwrap().trim())
}

/// The same package with another version, after a change of its files by a shell.
fn another(package: &Path, version: &str, change: &str) -> PathBuf {
    let folder = package.with_file_name(version);
    let new = package.with_file_name(format!("wideleaf_{version}.deb"));
    let script = format!(
        "dpkg-deb -R {} {folder} && cd {folder} && sed -i 's/^Version: .*/Version: {version}/' DEBIAN/control \
         && {change} && dpkg-deb --build --root-owner-group -Znone {folder} {}",
        package.display(),
        new.display(),
        folder = folder.display()
    );
    let output = Command::new("sh").args(["-c", &script]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    new
}

/// A host with the packages in its folder, or `None` with the reason printed.
fn host(prepare: impl FnOnce(&Path)) -> Option<Host> {
    let version = Command::new("ansible-playbook").arg("--version").output();
    let found = version.map_err(|error| format!("ansible-playbook: {error}")).and_then(|output| {
        let has_apt = Command::new("/usr/bin/python3").args(["-c", "import apt"]).output();
        match has_apt {
            _ if !output.status.success() => Err("ansible-playbook does not run".into()),
            _ if !Uid::effective().is_root() => Err("only root can make a root file system of its own".to_owned()),
            Ok(output) if output.status.success() => Ok(()),
            _ => Err("python3-apt is not installed".into()),
        }
    });
    if !is_there(Need::Ansible, found) {
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    prepare(folder.path());
    match Host::start(folder) {
        Ok(host) => Some(host),
        Err(why) => {
            is_there(Need::Ansible, Err(why));
            None
        }
    }
}

/// It takes longest, and is the first of them by its name.
#[test]
fn a_host_is_set_up_by_the_role_twice_alike_and_all_of_it_is_taken_back() {
    let Some(host) = host(|folder| fs::rename(package(folder), folder.join("wideleaf.deb")).unwrap()) else { return };
    let deb = format!("wideleaf_deb={}", host.folder.path().join("wideleaf.deb").display());
    let wanted = ["--extra-vars", deb.as_str(), "--extra-vars", CONFIGURED];
    let checked = [&wanted[..], &["--check", "--diff"]].concat();

    assert!(host.changes(&checked) > 0, "a check of a fresh host tells changes");
    assert!(!host.has("/usr/bin/wideleafd") && !host.has("/var/lib/wideleaf-ansible"), "and makes none");

    assert!(host.changes(&wanted) > 0);
    assert!(host.answers());
    let configuration = host.says("wideleafd", &["--check"]);
    for words in ["cpu_share = \"25%\"", "automatic = \"all\"", "name = \"db*\"", "weight = 2", "flavor = \"m1.*\""] {
        assert!(configuration.contains(words), "no {words} in\n{configuration}");
    }
    assert!(host.has("/etc/libvirt/hooks/qemu.d/wideleaf") || !host.has("/etc/libvirt"));
    assert_eq!((host.changes(&wanted), host.changes(&checked)), (0, 0), "nothing is left to do");

    let other = [&wanted[..2], &["--extra-vars", r#"{"wideleaf_config": {"budget": {"cpu_share": "30%"}}}"#]].concat();
    let told = host.changes(&[&other[..], &["--check"]].concat());
    assert!(host.says("wideleafd", &["--check"]).contains("cpu_share = \"25%\""), "a check changes nothing");
    assert_eq!((told, host.changes(&other)), (2, 2), "the file and the restart, told and done");
    assert!(host.answers() && host.says("wideleafd", &["--check"]).contains("cpu_share = \"30%\""));

    let wrong = [&wanted[..2], &["--extra-vars", r#"{"wideleaf_config": {"budget": {"cpu": "30%"}}}"#]].concat();
    let (recap, said) = host.site(&wrong);
    assert!(recap.failed == 1 && said.contains("unknown field `cpu`"), "{said}");
    assert!(host.answers() && host.says("wideleafd", &["--check"]).contains("cpu_share = \"30%\""), "all is as it was");

    let never = [&other[..], &["--extra-vars", "wideleaf_hook=never"]].concat();
    if host.has("/etc/libvirt/hooks/qemu.d/wideleaf") {
        assert_eq!((host.changes(&never), host.changes(&never)), (1, 0));
        assert!(!host.has("/etc/libvirt/hooks/qemu.d/wideleaf"));
    }

    let absent = ["--extra-vars", "wideleaf_state=absent"];
    let told = host.changes(&["--extra-vars", "wideleaf_state=absent", "--check"]);
    assert!(told > 0 && host.answers(), "a check changes nothing");
    assert_eq!(host.changes(&absent), told, "told and done");
    for path in [
        "/usr/bin/wideleaf",
        "/usr/bin/wideleafd",
        "/etc/wideleaf",
        "/var/lib/wideleaf",
        "/var/lib/wideleaf-ansible",
        "/run/wideleaf",
        "/etc/libvirt/hooks/qemu.d/wideleaf",
        KEPT,
    ] {
        assert!(!host.has(path), "{path} is left");
    }
    assert!(!host.run("pidof", &["wideleafd"]).status.success(), "the daemon runs on");
    assert_eq!(host.changes(&absent), 0);
}

/// The pool of 2 MiB pages, which a test brings back to its size also where it fails.
struct Pool {
    before: u64,
}

impl Pool {
    const FILE: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

    fn pages() -> u64 {
        fs::read_to_string(Pool::FILE).unwrap().trim().parse().unwrap()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if Pool::pages() != self.before {
            let _ = fs::write(Pool::FILE, self.before.to_string());
        }
    }
}

#[test]
fn a_pool_grows_to_the_wanted_number_of_pages_and_shrinks_by_what_was_added() {
    let Some(host) = host(|folder| fs::rename(package(folder), folder.join("wideleaf.deb")).unwrap()) else { return };
    let found = fs::File::options().write(true).open(Pool::FILE).map(drop);
    if !is_there(Need::Hugetlb, found.map_err(|error| format!("{}: {error}", Pool::FILE))) {
        return;
    }
    let pool = Pool { before: Pool::pages() };
    let own = pool.before + 2;
    fs::write(Pool::FILE, own.to_string()).unwrap();
    let deb = format!("wideleaf_deb={}", host.folder.path().join("wideleaf.deb").display());
    let at_least = |pages: u64| format!(r#"{{"wideleaf_pools": [{{"size": "2m", "pages": {pages}}}]}}"#);
    let (fewer, more) = (at_least(own - 1), at_least(own + 3));
    let common = ["--extra-vars", deb.as_str(), "--extra-vars", "wideleaf_service=false"];
    let wanted = [&common[..], &["--extra-vars", more.as_str()]].concat();
    assert!(host.changes(&[&common[..], &["--extra-vars", fewer.as_str()]].concat()) > 0);
    assert_eq!((Pool::pages(), host.has(KEPT)), (own, false), "a larger pool stays as it is, also after a boot");
    assert_eq!(host.changes(&[&wanted[..], &["--check"]].concat()), 3, "the pool, the note and the file for boots");
    assert_eq!(Pool::pages(), own, "a check changes nothing");
    assert_eq!(host.changes(&wanted), 3);
    assert_eq!(Pool::pages(), own + 3);
    let kept = host.says("cat", &[KEPT]);
    assert!(kept.ends_with(&format!("\nw! {} - - - - {}\n", Pool::FILE, own + 3)), "{kept}");
    assert_eq!(host.changes(&wanted), 0);
    assert!(host.changes(&["--extra-vars", "wideleaf_state=absent"]) > 0);
    assert_eq!((Pool::pages(), host.has(KEPT)), (own, false));
}

#[test]
fn a_host_that_had_wideleaf_before_keeps_its_own_configuration() {
    let Some(host) = host(|folder| fs::rename(package(folder), folder.join("wideleaf.deb")).unwrap()) else { return };
    let deb = host.folder.path().join("wideleaf.deb");
    host.says("dpkg", &["--install", deb.to_str().unwrap()]);
    host.says("sh", &["-c", "printf '[budget]\\ncpu_share = \"7%%\"\\n' >/etc/wideleaf/wideleafd.toml"]);
    let wanted = ["--extra-vars", &format!("wideleaf_deb={}", deb.display()), "--extra-vars", CONFIGURED];
    assert!(host.changes(&wanted) > 0);
    assert!(host.says("wideleafd", &["--check"]).contains("cpu_share = \"25%\""));
    let absent = ["--extra-vars", "wideleaf_state=absent"];
    assert!(host.changes(&absent) > 0);
    assert!(host.answers() && host.says("wideleafd", &["--check"]).contains("cpu_share = \"7%\""));
    assert!(!host.has("/var/lib/wideleaf-ansible"));

    // Without a purge, the package leaves its configuration behind.
    host.says("dpkg", &["--remove", "wideleaf"]);
    assert!(host.changes(&wanted) > 0);
    assert!(host.says("wideleafd", &["--check"]).contains("cpu_share = \"25%\""));
    assert!(host.changes(&absent) > 0);
    assert!(host.says("cat", &["/etc/wideleaf/wideleafd.toml"]).contains("cpu_share = \"7%\""));
    assert!(!host.has("/usr/bin/wideleafd") && !host.has("/var/lib/wideleaf-ansible"));
}

#[test]
fn an_upgrade_goes_from_host_to_host_and_stops_at_the_first_that_is_not_well() {
    let prepare = |folder: &Path| {
        let first = package(folder);
        let again = another(&first, "9.0", "mkdir -p usr/lib/wideleaf && touch usr/lib/wideleaf/again");
        fs::rename(again, folder.join("wideleaf_again.deb")).unwrap();
        fs::rename(folder.join("9.0"), folder.join("again")).unwrap();
        another(&first, "9.0", "true");
        another(&first, "9.1", "ln -sf /bin/false usr/bin/wideleafd");
        fs::rename(first, folder.join("wideleaf_first.deb")).unwrap();
    };
    let Some(host) = host(prepare) else { return };
    let deb =
        |name: &str| format!("wideleaf_deb={}", host.folder.path().join(format!("wideleaf_{name}.deb")).display());
    let upgrade = |name: &str| {
        let playbook = Path::new(REPOSITORY).join("packaging/ansible/upgrade.yml");
        let deb = deb(name);
        let said =
            host.playbook_on(&["a", "b"], &playbook, &["--extra-vars", &deb, "--extra-vars", "wideleaf_hosts=all"]);
        let recaps = ["a", "b"].map(|name| recap(&said, name));
        (recaps, said)
    };
    assert!(host.changes(&["--extra-vars", &deb("first"), "--extra-vars", CONFIGURED]) > 0);
    let installed = || host.says("dpkg-query", &["--show", "--showformat=${Version}", "wideleaf"]);
    let ([a, b], said) = upgrade("9.0");
    assert_eq!((installed(), a.map(|a| a.failed), b.map(|b| b.failed)), ("9.0".into(), Some(0), Some(0)), "{said}");
    assert!(host.answers());
    let configuration = host.says("wideleafd", &["--check"]);
    assert!(configuration.contains("cpu_share = \"25%\"") && configuration.contains("db*"), "{configuration}");
    // A package that was built again has the version that is installed, and other files. It is installed also where an
    // earlier run ended after it had copied the file.
    host.says("cp", &[deb("again").trim_start_matches("wideleaf_deb="), "/var/lib/wideleaf-ansible/wideleaf.deb"]);
    let ([a, b], said) = upgrade("again");
    assert_eq!((a.map(|a| a.failed), b.map(|b| (b.failed, b.changed))), (Some(0), Some((0, 0))), "{said}");
    assert!(installed() == "9.0" && host.has("/usr/lib/wideleaf/again") && host.answers(), "{said}");
    let ([a, b], said) = upgrade("9.1");
    assert!(a.is_some_and(|a| a.failed == 1) && b.is_none(), "{said}");
}
