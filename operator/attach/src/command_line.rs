//! QEMU's command line, as far as guest RAM and the actions on it depend on it (qemu(1)). Read from
//! `/proc/PID/cmdline`, which every user may read. Unknown options are skipped: a command line is never an error.
//!
//! ```text
//!   -m size=262144k -machine pc-q35-7.2,memory-backend=pc.ram
//!      └ ram                 └ machine                 └ main_backend
//!
//!   -object {"qom-type":"memory-backend-ram","id":"pc.ram","size":268435456}
//!           └ backends[0]
//! ```

use serde_json::Value;
use wideleaf_memory::numa::placement::NodePolicy;
use wideleaf_policies::Bytes;
use wideleaf_policies::units::mib;

use crate::placed;

/// Default of `-m` (qemu(1)).
const RAM_DEFAULT: Bytes = mib(128);

/// Upper bound on QEMU's NUMA nodes (`MAX_NODES`).
const NODES_MAX: usize = 128;

/// Parsed command line of QEMU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandLine {
    /// Name from `-name guest=…`.
    pub name: Option<String>,
    /// UUID from `-uuid`.
    pub uuid: Option<String>,
    /// Type of the machine: `pc-q35-7.2`.
    pub machine: String,
    /// RAM at start from `-m`, without plugged memory.
    pub ram: Bytes,
    /// Backend from `-machine memory-backend=…`.
    pub main_backend: Option<String>,
    /// Backends from `-object memory-backend-…`.
    pub backends: Vec<Backend>,
    /// Backends of the NUMA nodes, in the order of the nodes, which is that of guest-physical addresses.
    pub node_backends: Vec<String>,
    /// Whether the guest's memory is encrypted (`sev-guest`, `sev-snp-guest`, `tdx-guest`).
    pub is_encrypted: bool,
    /// Devices by which the guest may give memory back.
    pub returns: Returns,
    /// Sockets that serve QMP (`-qmp unix:…`).
    pub qmp_sockets: Vec<String>,
}

/// One memory backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backend {
    /// Id of the object.
    pub id: String,
    /// Size in bytes.
    pub bytes: Bytes,
    /// Its `mem-path`, for a backend on a file.
    pub path: Option<String>,
    /// Whether it is a memfd.
    pub is_memfd: bool,
    /// NUMA nodes of its memory, from `host-nodes=` and `policy=`; `None` where the kernel chooses.
    pub nodes: Option<NodePolicy>,
}

/// Devices by which a guest gives memory back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Returns {
    /// A balloon with a size that can be queried.
    pub balloon: bool,
    /// Free page reporting: the guest gives pages back at any time.
    pub free_page_reporting: bool,
    /// virtio-mem: blocks that are not plugged are absent.
    pub virtio_mem: bool,
}

impl Returns {
    /// The devices of both.
    #[must_use]
    pub fn or(self, other: Returns) -> Returns {
        Returns {
            balloon: self.balloon || other.balloon,
            free_page_reporting: self.free_page_reporting || other.free_page_reporting,
            virtio_mem: self.virtio_mem || other.virtio_mem,
        }
    }
}

impl CommandLine {
    /// Parses the arguments of a process, with its own name first.
    pub fn parse(arguments: &[String]) -> CommandLine {
        let mut found = CommandLine::default();
        for pair in arguments.windows(2) {
            let Some(option) = pair[0].strip_prefix('-') else { continue };
            found.take(option.strip_prefix('-').unwrap_or(option), &pair[1]);
        }
        found
    }

    fn take(&mut self, option: &str, text: &str) {
        let settings = || Settings::parse(text);
        match option {
            "name" => self.name = settings().get("guest").or_else(|| settings().first()),
            "uuid" => self.uuid = Some(text.to_owned()),
            "m" => {
                self.ram =
                    settings().first_or("size").and_then(|size| size_of(&size, Unit::Mebibytes)).unwrap_or(self.ram)
            }
            "machine" | "M" => self.take_machine(&settings()),
            "object" => self.take_object(&settings()),
            "numa" => self.node_backends.extend(settings().get("memdev")),
            "device" => self.take_device(&settings()),
            "qmp" => self.qmp_sockets.extend(socket_of(text)),
            _ => {}
        }
    }

    fn take_machine(&mut self, settings: &Settings) {
        if let Some(machine) = settings.first_or("type") {
            self.machine = machine;
        }
        if let Some(backend) = settings.get("memory-backend") {
            self.main_backend = Some(backend);
        }
        self.is_encrypted |=
            ["confidential-guest-support", "memory-encryption"].iter().any(|key| settings.get(key).is_some());
    }

    fn take_object(&mut self, settings: &Settings) {
        let kind = settings.first_or("qom-type").unwrap_or_default();
        self.is_encrypted |= ["sev-guest", "sev-snp-guest", "tdx-guest"].contains(&kind.as_str());
        let size = settings.get("size").and_then(|size| size_of(&size, Unit::Bytes));
        if let (true, Some(id), Some(bytes)) = (kind.starts_with("memory-backend-"), settings.get("id"), size) {
            let (path, is_memfd) = (settings.get("mem-path"), kind == "memory-backend-memfd");
            let nodes = placed::policy(settings.all("host-nodes"), settings.get("policy").as_deref());
            self.backends.push(Backend { id, bytes, path, is_memfd, nodes });
        }
    }

    fn take_device(&mut self, settings: &Settings) {
        let driver = settings.first_or("driver").unwrap_or_default();
        self.returns.virtio_mem |= driver.starts_with("virtio-mem");
        if driver.starts_with("virtio-balloon") {
            self.returns.balloon = true;
            let reports = settings.get("free-page-reporting");
            self.returns.free_page_reporting |= reports.is_some_and(|value| value == "on" || value == "true");
        }
    }

    /// The backends of the RAM that the guest starts with, in the order of guest-physical addresses. Without any,
    /// QEMU makes one.
    pub fn start_backends(&self) -> Vec<Backend> {
        let by_id = |id: &String| self.backends.iter().find(|backend| backend.id == *id).cloned();
        let of_nodes: Vec<_> = self.node_backends.iter().take(NODES_MAX).filter_map(by_id).collect();
        if !of_nodes.is_empty() {
            return of_nodes;
        }
        let own = Backend { id: "ram".to_owned(), bytes: self.ram, path: None, is_memfd: false, nodes: None };
        vec![self.main_backend.as_ref().and_then(by_id).unwrap_or(own)]
    }
}

impl Default for CommandLine {
    fn default() -> CommandLine {
        CommandLine {
            name: None,
            uuid: None,
            machine: String::new(),
            ram: RAM_DEFAULT,
            main_backend: None,
            backends: Vec::new(),
            node_backends: Vec::new(),
            is_encrypted: false,
            returns: Returns::default(),
            qmp_sockets: Vec::new(),
        }
    }
}

/// Settings of the form `first,key=value,…`, with `,,` for a comma, or the same as a JSON object. A list in JSON is a
/// text with commas.
struct Settings(Vec<(String, String)>);

impl Settings {
    fn parse(text: &str) -> Settings {
        match serde_json::from_str(text) {
            Ok(Value::Object(object)) => {
                Settings(object.into_iter().filter_map(|(key, value)| Some((key, scalar(value)?))).collect())
            }
            _ => Settings(text.replace(",,", "\0").split(',').map(setting).collect()),
        }
    }

    fn get(&self, key: &str) -> Option<String> {
        self.0.iter().rev().find(|(name, _)| name == key).map(|(_, value)| value.clone())
    }

    /// Each value of a key that may be there several times.
    fn all<'a>(&'a self, key: &'a str) -> impl Iterator<Item = &'a str> {
        self.0.iter().filter(move |(name, _)| name == key).map(|(_, value)| value.as_str())
    }

    /// The value without a key in first place.
    fn first(&self) -> Option<String> {
        self.0.first().filter(|(name, value)| name.is_empty() && !value.is_empty()).map(|(_, value)| value.clone())
    }

    fn first_or(&self, key: &str) -> Option<String> {
        self.first().or_else(|| self.get(key))
    }
}

fn setting(text: &str) -> (String, String) {
    let (key, value) = text.split_once('=').unwrap_or(("", text));
    (key.replace('\0', ","), value.replace('\0', ","))
}

fn scalar(value: Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text),
        Value::Number(number) => Some(number.to_string()),
        Value::Bool(is_on) => Some(is_on.to_string()),
        Value::Array(values) => {
            let values: Option<Vec<String>> = values.into_iter().map(scalar).collect();
            Some(values?.join(","))
        }
        Value::Null | Value::Object(_) => None,
    }
}

/// The path in `unix:PATH,server=on`.
fn socket_of(text: &str) -> Option<String> {
    let path = text.strip_prefix("unix:")?.replace(",,", "\0").split(',').next()?.replace('\0', ",");
    let path = path.strip_prefix("path=").unwrap_or(&path);
    (!path.is_empty()).then(|| path.to_owned())
}

/// Unit of a size without a suffix.
#[derive(Clone, Copy)]
enum Unit {
    Bytes,
    Mebibytes,
}

/// Parses a size as QEMU writes it: a number, and one of `B K M G T` in either case.
fn size_of(text: &str, without_suffix: Unit) -> Option<Bytes> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match (text[digits.len()..].to_ascii_lowercase().as_str(), without_suffix) {
        ("", Unit::Mebibytes) | ("m", _) => 20,
        ("", Unit::Bytes) | ("b", _) => 0,
        ("k", _) => 10,
        ("g", _) => 30,
        ("t", _) => 40,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift).map(Bytes::new)
}

#[cfg(test)]
mod tests {
    use super::*;
    use wideleaf_policies::units::{gib, mib};

    fn parse(line: &str) -> CommandLine {
        CommandLine::parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn the_command_line_of_a_libvirt_domain_is_parsed() {
        let line = parse(
            r#"/usr/bin/qemu-system-x86_64 -name guest=t1,debug-threads=on -S
               -machine pc-q35-7.2,usb=off,dump-guest-core=off,memory-backend=pc.ram -m 256
               -object {"qom-type":"memory-backend-ram","id":"pc.ram","size":268435456} -overcommit mem-lock=off
               -uuid 5f6e5dd0-6f5c-4d4f-8f2c-0e8a7e6a0001
               -device {"driver":"virtio-balloon-pci","id":"balloon0","free-page-reporting":true}"#,
        );
        assert_eq!(line.name.as_deref(), Some("t1"));
        assert_eq!(line.uuid.as_deref(), Some("5f6e5dd0-6f5c-4d4f-8f2c-0e8a7e6a0001"));
        assert_eq!((line.machine.as_str(), line.ram), ("pc-q35-7.2", mib(256)));
        let backend = Backend { id: "pc.ram".into(), bytes: mib(256), path: None, is_memfd: false, nodes: None };
        assert_eq!(line.start_backends(), [backend]);
        assert_eq!(line.returns, Returns { balloon: true, free_page_reporting: true, virtio_mem: false });
        assert!(!line.is_encrypted);
    }

    #[test]
    fn the_nodes_backends_come_in_the_order_of_the_nodes() {
        let line = parse(
            "qemu -m 1G -object memory-backend-memfd,id=b,size=512M \
             -object memory-backend-file,id=a,size=512M,mem-path=/dev/hugepages \
             -numa node,nodeid=0,memdev=a -numa node,nodeid=1,memdev=b",
        );
        let of_nodes: Vec<_> = line.start_backends().into_iter().map(|b| (b.id, b.path, b.is_memfd)).collect();
        assert_eq!(of_nodes, [("a".into(), Some("/dev/hugepages".into()), false), ("b".into(), None, true)]);
    }

    #[test]
    fn the_nodes_of_a_backend_are_read_from_both_forms_of_its_options() {
        let line = parse(
            r#"qemu -object memory-backend-ram,id=a,size=1G,host-nodes=0,host-nodes=2-3,policy=bind
               -object {"qom-type":"memory-backend-memfd","id":"b","size":1048576,"host-nodes":[1],"policy":"preferred"}
               -object memory-backend-ram,id=c,size=1G,policy=default"#,
        );
        let nodes = |backend: &Backend| backend.nodes.map(|of| format!("{} {}", of.mode.name(), of.nodes));
        let of_each: Vec<Option<String>> = line.backends.iter().map(nodes).collect();
        assert_eq!(of_each, [Some("bind 0,2-3".into()), Some("preferred 1".into()), None]);
    }

    #[test]
    fn a_guest_without_backends_has_one_of_all_its_ram() {
        let line = parse(
            "qemu-system-x86_64 -M pc -m size=4G,slots=2,maxmem=8G -name web,,1 -qmp unix:/run/a,server=on,wait=off",
        );
        assert_eq!(line.start_backends()[0].bytes, gib(4));
        assert_eq!(line.name.as_deref(), Some("web,1"));
        assert_eq!(line.qmp_sockets, ["/run/a"]);
        assert_eq!(parse("qemu-system-x86_64").ram, mib(128));
    }

    #[test]
    fn encryption_and_plugged_memory_are_seen() {
        assert!(parse("qemu -object sev-guest,id=sev0,cbitpos=47").is_encrypted);
        assert!(parse("qemu --machine q35,confidential-guest-support=tdx0").is_encrypted);
        assert!(parse("qemu -device virtio-mem-pci,memdev=m0,id=vm0").returns.virtio_mem);
    }

    #[test]
    fn sizes_have_qemus_units() {
        assert_eq!(size_of("262144k", Unit::Mebibytes), Some(mib(256)));
        assert_eq!(size_of("256", Unit::Mebibytes), Some(mib(256)));
        assert_eq!(size_of("4096", Unit::Bytes), Some(Bytes::new(4096)));
        assert_eq!(size_of("1T", Unit::Bytes), Some(gib(1024)));
        for wrong in ["", "x", "1.5G", "99999999999999999999", "18446744073709551615G"] {
            assert_eq!(size_of(wrong, Unit::Bytes), None, "{wrong}");
        }
    }
}
