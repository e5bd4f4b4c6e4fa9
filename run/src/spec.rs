//! Specification of a run: plain values, with which nothing has been opened or changed yet. A program can keep it as
//! JSON, or in any other format of serde; `form.rs` has the forms of sizes, times and names.

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use wideleaf_control::view::Guarantee;
use wideleaf_kernels::Kernel;
use wideleaf_kernels::npb::classes::Class;
use wideleaf_kernels::registry::{MemoryNeed, by_name};
use wideleaf_memory::BackingConfig;
use wideleaf_memory::manager::OutOfReach;
use wideleaf_policies::{Bytes, PageSize, PolicyChoice, policy};
use wideleaf_vmm::devices::virtio::block::DiskOptions;
use wideleaf_vmm::devices::virtio::net::Mac;
use wideleaf_vmm::run_loop::OnReset;
use wideleaf_vmm::sandbox::User;

use crate::kernel;
use numa::NumaSpec;

mod form;
pub mod numa;

/// Kernel or image to run: `{"kernel": "gups"}` or `{"image": "/boot/vmlinuz"}`.
#[derive(Clone, Debug)]
pub enum Workload {
    /// A built-in kernel, in the embedded guest image or natively.
    Kernel(&'static str),
    /// A file: an ELF image with a PVH entry, a bzImage or a vmlinux.
    Image(PathBuf),
}

/// A run with checked arguments.
///
/// It can be written and read with serde, with units at the end of the names. Reading checks each value, refuses an
/// unknown name and opens no file; [`crate::engine::run`] checks the rest. An option that is missing is `None`, except
/// `sandbox`: a specification must say `null` for a run without one. Paths must be UTF-8.
///
/// ```
/// let spec: wideleaf_run::spec::RunSpec = serde_json::from_str(
///     r#"{
///         "workload": {"kernel": "gups"},
///         "is_native": false,
///         "cmdline": "log2_words=25",
///         "devices": {"disks": [{"path": "disk.img", "is_read_only": true}]},
///         "memory_bytes": 1073741824,
///         "vcpus": 1,
///         "backing": {"kind": "anon", "start_page": "4k"},
///         "guest_page": "2m",
///         "policy": "thp:max_ptes_none=64",
///         "policy_delay_s": 0.5,
///         "is_prefaulted": false,
///         "fallback": "fail",
///         "on_reset": "stop",
///         "console": "nothing",
///         "sandbox": {"must_be_complete": false}
///     }"#,
/// )?;
/// assert_eq!(spec.policy.name(), "thp");
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunSpec {
    /// Kernel or image to run.
    pub workload: Workload,
    /// Whether it runs in this process instead of in a guest.
    pub is_native: bool,
    /// Command line of the guest or kernel.
    pub cmdline: String,
    /// File with the initial RAM disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initrd: Option<PathBuf>,
    /// Devices of the guest.
    #[serde(default)]
    pub devices: DeviceSpec,
    /// Size of guest RAM.
    #[serde(rename = "memory_bytes", with = "form::scalar")]
    pub memory: Bytes,
    /// Number of vCPUs, or of threads of a native kernel.
    pub vcpus: u8,
    /// NUMA cells of the guest and their places on the host.
    #[serde(default, skip_serializing_if = "NumaSpec::is_auto")]
    pub numa: NumaSpec,
    /// Memory that backs guest RAM.
    #[serde(with = "form::backing")]
    pub backing: BackingConfig,
    /// Page size of the guest's tables.
    #[serde(with = "form::scalar")]
    pub guest_page: PageSize,
    /// Policy of the manager.
    #[serde(with = "form::scalar")]
    pub policy: PolicyChoice,
    /// Share of present memory to keep in large pages.
    #[serde(default, with = "form::scalar")]
    pub guarantee: Guarantee,
    /// Delay before the policy may act.
    #[serde(default, with = "form::optional", skip_serializing_if = "Option::is_none", rename = "policy_delay_s")]
    pub policy_delay: Option<Duration>,
    /// Largest part of any 100 ms for which the policy may keep windows out of the guest's reach; `None`: the daemon's,
    /// or the default where no daemon says one.
    #[serde(default, with = "form::optional", skip_serializing_if = "Option::is_none")]
    pub out_of_reach: Option<OutOfReach>,
    /// Whether all RAM is faulted in first.
    pub is_prefaulted: bool,
    /// Action when the pool is too small.
    pub fallback: Fallback,
    /// Maximum number of pages of 1 GiB that are made for the run where the pool has none free.
    #[serde(default)]
    pub giant_pages_made_max: u16,
    /// File that records what the manager observes, plans and does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub record: Option<PathBuf>,
    /// Time after which the guest is stopped.
    #[serde(default, with = "form::optional", skip_serializing_if = "Option::is_none", rename = "timeout_s")]
    pub timeout: Option<Duration>,
    /// Action when the guest resets its machine.
    pub on_reset: OnReset,
    /// Place of the guest's serial console.
    pub console: Console,
    /// Socket of the wideleafd that the guest registers with, if it listens; `None`: no registration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub daemon: Option<PathBuf>,
    /// Control socket of the VM itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub control_socket: Option<PathBuf>,
    /// Folder of the snapshot that the guest continues; its kernel or image is then not loaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restore: Option<PathBuf>,
    /// Use of the order in which a restored guest first touched its memory.
    #[serde(default)]
    pub prefetch: Prefetch,
    /// Way in which RAM of a snapshot is read. Earlier builds wrote `restores_directly`, which is read too.
    #[serde(default, alias = "restores_directly", deserialize_with = "form::restore_reads")]
    pub restore_reads: RestoreReads,
    /// Limit in bytes per second of what is read before the guest touches it; `None`: as fast as possible.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restore_bytes_per_second: Option<NonZeroU64>,
    /// Way in which the RAM of a restored guest gets its pages.
    #[serde(default)]
    pub restore_pages: RestorePages,
    /// Permanent restrictions of the guest's process while it runs. They apply to all else that this process would do.
    #[serde(deserialize_with = "form::present")]
    pub sandbox: Option<SandboxSpec>,
}

/// Use of the order in which a restored guest first touched its memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Prefetch {
    /// RAM is filled in the order that is recorded beside the snapshot, if one is.
    #[default]
    Use,
    /// The order of this run is recorded beside the snapshot.
    Record,
    /// A recorded order has no effect.
    Off,
}

/// Way in which the RAM of a restored guest gets its pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RestorePages {
    /// Huge pages where the guest had them, base pages elsewhere.
    #[default]
    Auto,
    /// Copies of 4 KiB, page by page.
    #[serde(rename = "4k")]
    Base,
    /// A private mapping of the snapshot's file, of which the kernel copies a page that is written.
    Mapped,
}

/// Way in which a restore reads the snapshot's file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RestoreReads {
    /// Through the host's page cache if half of the file is there, past it otherwise.
    #[default]
    Auto,
    /// Through the page cache: what is read stays there for other VMs of the snapshot.
    Cached,
    /// Past the page cache (`O_DIRECT`, open(2)).
    Direct,
}

/// Place of the guest's serial console.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Console {
    /// The front end's console, byte by byte.
    Bytes,
    /// The front end's lines, for all lines that are no results of a kernel.
    Lines,
    /// No console output at all.
    Nothing,
}

/// Action when the hugetlb pool is too small.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fallback {
    /// The run is refused.
    Fail,
    /// Anonymous memory that starts with transparent huge pages.
    Thp,
}

/// Devices that a guest has.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DeviceSpec {
    /// Disks, in the order in which the guest finds them.
    pub disks: Vec<DiskOptions>,
    /// Network cards, in the order in which the guest finds them.
    pub cards: Vec<NetOptions>,
    /// Sockets between guest and host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vsock: Option<VsockOptions>,
    /// Balloon, with the size that it takes of the guest's RAM at first.
    #[serde(rename = "balloon_bytes", with = "form::optional", skip_serializing_if = "Option::is_none")]
    pub balloon: Option<Bytes>,
    /// Whether there is a source of random bytes.
    pub has_rng: bool,
}

/// Settings of a network card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetOptions {
    /// Name of the tap.
    pub tap: String,
    /// Address of the card, if it is not derived from names.
    #[serde(default, with = "form::optional", skip_serializing_if = "Option::is_none")]
    pub mac: Option<Mac>,
}

/// Settings of the sockets between guest and host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VsockOptions {
    /// Context id (address) of the guest.
    pub cid: u32,
    /// Socket that programs of the host connect to.
    pub socket: PathBuf,
}

/// Settings of a run's sandbox.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SandboxSpec {
    /// User to become, in JSON as `UID:GID`.
    #[serde(with = "form::optional", skip_serializing_if = "Option::is_none")]
    pub user: Option<User>,
    /// Folder that becomes the root directory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub jail: Option<PathBuf>,
    /// Whether the run is refused if this host's kernel lacks a part.
    pub must_be_complete: bool,
    /// Folder of the result: files can be made nowhere else.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output_folder: Option<PathBuf>,
}

impl DeviceSpec {
    /// Whether there is no device.
    pub fn is_empty(&self) -> bool {
        let DeviceSpec { disks, cards, vsock, balloon, has_rng } = self;
        disks.is_empty() && cards.is_empty() && vsock.is_none() && balloon.is_none() && !has_rng
    }
}

impl RunSpec {
    /// A kernel in a guest of one vCPU and large pages under `never`, without devices, files, console, time limit,
    /// daemon and sandbox.
    ///
    /// # Panics
    /// Never: the policy is in the list.
    pub fn of_kernel(name: &'static str, cmdline: impl Into<String>, memory: Bytes, backing: BackingConfig) -> RunSpec {
        RunSpec {
            workload: Workload::Kernel(name),
            is_native: false,
            cmdline: cmdline.into(),
            initrd: None,
            devices: DeviceSpec::default(),
            memory,
            vcpus: 1,
            numa: NumaSpec::Auto,
            backing,
            guest_page: PageSize::Huge2M,
            policy: policy::by_name("never").expect("it is in the list").into(),
            guarantee: Guarantee::BestEffort,
            policy_delay: None,
            out_of_reach: None,
            is_prefaulted: false,
            fallback: Fallback::Fail,
            giant_pages_made_max: 0,
            record: None,
            timeout: None,
            on_reset: OnReset::Stop,
            console: Console::Nothing,
            daemon: None,
            control_socket: None,
            restore: None,
            prefetch: Prefetch::Use,
            restore_reads: RestoreReads::Auto,
            restore_bytes_per_second: None,
            restore_pages: RestorePages::Auto,
            sandbox: None,
        }
    }

    /// The guest's whole command line: first the part for the image, then the user's.
    pub fn guest_cmdline(&self) -> String {
        match self.workload {
            Workload::Kernel(name) => kernel::line(name, &self.cmdline),
            Workload::Image(_) => self.cmdline.clone(),
        }
    }

    fn kernel(&self) -> Option<&'static Kernel> {
        match self.workload {
            Workload::Kernel(name) => by_name(name),
            Workload::Image(_) => None,
        }
    }

    /// Class of the problem; `None` if the workload has no classes.
    pub fn class(&self) -> Option<Class> {
        kernel::class_of(self.kernel()?, &self.cmdline)
    }

    /// RAM that the kernel needs, in bytes; `None` for an image, and for a kernel that uses all RAM.
    pub fn memory_needed_bytes(&self) -> Option<u64> {
        match kernel::memory_needed(self.kernel()?, &self.cmdline, self.vcpus) {
            Ok(MemoryNeed::Bytes(bytes)) => Some(bytes),
            Ok(MemoryNeed::AllThereIs) | Err(_) => None,
        }
    }

    /// Name of the kernel, or path of the image.
    pub fn workload_name(&self) -> String {
        match &self.workload {
            Workload::Kernel(name) => (*name).to_owned(),
            Workload::Image(path) => path.display().to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// A specification with a value for each field.
    fn whole() -> Value {
        json!({
            "workload": {"image": "/boot/vmlinuz"},
            "is_native": false,
            "cmdline": "console=ttyS0",
            "initrd": "/boot/initrd",
            "devices": {
                "disks": [{"path": "a.img", "is_read_only": true, "id": "root"}],
                "cards": [{"tap": "tap0", "mac": "02:00:00:00:00:01"}],
                "vsock": {"cid": 3, "socket": "/run/vsock"},
                "balloon_bytes": 4096,
                "has_rng": true,
            },
            "memory_bytes": 1_u64 << 40,
            "vcpus": 2,
            "numa": {"cells": [
                {"id": 0, "cpus": "0", "memory_bytes": 1_u64 << 39, "host_nodes": "0-1", "policy": "interleave",
                 "host_cpus": "0-3", "distances": [[1, 21]], "latencies_ns": {"cells": [[0, 90], [1, 140]]}},
                {"id": 1, "cpus": "1", "memory_bytes": 1_u64 << 39, "policy": "bind", "page_size": "2m",
                 "bandwidths_mb_s": "host"},
            ]},
            "backing": {"kind": "memfd", "start_page": "4k", "is_reservable": true},
            "guest_page": "1g",
            "policy": "schemes:rules=min max 10% max min max promote,quota_windows=8",
            "guarantee": "bestEffort:95%",
            "policy_delay_s": 0.25,
            "out_of_reach": "12.50%",
            "is_prefaulted": true,
            "fallback": "thp",
            "giant_pages_made_max": 2,
            "record": "run.rec",
            "timeout_s": 120.0,
            "on_reset": "restart",
            "console": "bytes",
            "daemon": "/run/daemon.sock",
            "control_socket": "/run/vm.sock",
            "restore": "/srv/saved",
            "prefetch": "record",
            "restore_reads": "direct",
            "restore_bytes_per_second": 1_u64 << 30,
            "restore_pages": "4k",
            "sandbox": {"user": "1000:100", "jail": "/var/empty", "must_be_complete": true, "output_folder": "/tmp"},
        })
    }

    fn read(json: &Value) -> Result<RunSpec, String> {
        serde_json::from_str(&json.to_string()).map_err(|error| error.to_string())
    }

    /// The specification with `value` at `pointer`, or without it for `None`.
    fn with(pointer: &str, value: Option<Value>) -> Value {
        let mut json = whole();
        let (parent, key) = pointer.rsplit_once('/').expect("a pointer begins with a slash");
        let parent = json.pointer_mut(parent).and_then(Value::as_object_mut).expect("it is an object");
        match value {
            Some(value) => drop(parent.insert(key.to_owned(), value)),
            None => drop(parent.remove(key).expect("it is there")),
        }
        json
    }

    #[test]
    fn a_specification_that_is_written_and_read_again_is_the_same() {
        let spec = read(&whole()).expect("it is valid");
        let written = serde_json::to_value(&spec).expect("its paths are UTF-8");
        assert_eq!(written, whole());
        let again = read(&written).expect("it is valid");
        assert_eq!(format!("{again:?}"), format!("{spec:?}"));
    }

    #[test]
    fn a_missing_option_is_none_but_a_missing_sandbox_is_refused() {
        let options = ["initrd", "policy_delay_s", "out_of_reach", "record", "timeout_s", "daemon", "control_socket"];
        for option in options.into_iter().chain(["devices"]) {
            read(&with(&format!("/{option}"), None)).expect("it may be missing");
        }
        let error = read(&with("/sandbox", None)).expect_err("a run without a sandbox says so");
        assert!(error.starts_with("missing field `sandbox`"), "{error}");
        assert!(read(&with("/sandbox", Some(Value::Null))).expect("it may be null").sandbox.is_none());
        assert!(read(&with("/memory_bytes", None)).is_err());
    }

    #[test]
    fn a_specification_of_an_earlier_build_says_with_a_boolean_whether_a_restore_reads_past_the_page_cache() {
        let mut json = with("/restore_reads", None);
        for (is_direct, reads) in [(true, RestoreReads::Direct), (false, RestoreReads::Auto)] {
            json["restores_directly"] = json!(is_direct);
            assert_eq!(read(&json).expect("it is valid").restore_reads, reads);
        }
        assert!(read(&with("/restore_reads", Some(json!("past")))).is_err());
    }

    #[test]
    fn an_unknown_name_is_refused_at_every_level() {
        for parent in ["", "/devices", "/devices/vsock", "/backing", "/sandbox"] {
            let error = read(&with(&format!("{parent}/colour"), Some(json!(1)))).expect_err("no such field exists");
            assert!(error.starts_with("unknown field `colour`"), "{parent}: {error}");
        }
        let disk = json!([{"path": "a.img", "colour": 1}]);
        assert!(read(&with("/devices/disks", Some(disk))).is_err_and(|error| error.starts_with("unknown field")));
        let card = json!([{"tap": "tap0", "colour": 1}]);
        assert!(read(&with("/devices/cards", Some(card))).is_err_and(|error| error.starts_with("unknown field")));
    }

    #[test]
    fn a_value_that_does_not_exist_is_refused_with_the_reason() {
        let cases = [
            ("/workload", json!({"kernel": "gusp"}), "unknown kernel \"gusp\"; the kernels are "),
            ("/guest_page", json!("3m"), "write 4k, 2m or 1g"),
            ("/policy", json!("gready"), "there is no policy \"gready\""),
            ("/timeout_s", json!(-1.0), "-1 is no time in seconds"),
            ("/out_of_reach", json!("0%"), "write a number from 1 to 100 and a %"),
            ("/backing/start_page", json!("1g"), "only the hugetlb pool has them"),
            ("/backing/kind", json!("anon"), "only for memfd RAM on 4k pages"),
            ("/devices/cards", json!([{"tap": "tap0", "mac": "1"}]), "write six bytes in hexadecimal"),
            ("/sandbox/user", json!("root"), "cannot use the user \"root\": write UID:GID"),
        ];
        for (pointer, value, why) in cases {
            let error = read(&with(pointer, Some(value))).expect_err("it does not exist");
            assert!(error.contains(why), "{pointer}: {error}");
        }
    }
}
