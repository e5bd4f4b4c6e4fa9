//! Requests and replies. A client writes one [`Envelope`] as one line of JSON and reads one [`Reply`] as one line; it may do so
//! again on the same connection. Unknown fields are ignored, so that fields may be added within a version; whoever
//! changes the meaning of one raises [`VERSION`].

use serde::{Deserialize, Serialize};

use crate::view::{ByteCount, DaemonView, Explanation, VmView, WindowMap};

/// Of what is written on the socket. A daemon refuses any other, with its own in the text.
pub const VERSION: u32 = 1;

/// Where the daemon listens unless told otherwise.
pub const SOCKET_PATH: &str = "/run/wideleaf/control.sock";

/// No line is longer: the map of a VM of 4 TiB has 2 million windows, a byte or two each. A reader ends the connection with a longer
/// one.
pub const LINE_BYTES_MAX: usize = 8 << 20;

/// One line of a client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Envelope<R = Request> {
    /// [`VERSION`], or that of another protocol of lines.
    pub version: u32,
    /// What is wanted.
    #[serde(flatten)]
    pub request: R,
}

impl From<Request> for Envelope {
    fn from(request: Request) -> Envelope {
        Envelope { version: VERSION, request }
    }
}

/// What a client wants. `vm`: a name, a process id or a libvirt UUID, as `wideleaf list` shows them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case")]
pub enum Request {
    /// The daemon itself. Answer: [`Answer::Daemon`].
    Daemon,
    /// All VMs that are known. Answer: [`Answer::Vms`].
    List,
    /// Room in the hugetlb pools that was made for libvirt domains. Answer: [`Answer::Rooms`].
    Rooms,
    /// One VM. Answer: [`Answer::Vm`].
    Info {
        /// Which.
        vm: String,
    },
    /// Why windows of a VM are not huge. Answer: [`Answer::Explanation`].
    Explain {
        /// Which.
        vm: String,
    },
    /// What is behind every window of a VM. Answer: [`Answer::Windows`].
    Windows {
        /// Which.
        vm: String,
    },
    /// Changes what is said about a VM that is managed. Answer: [`Answer::Vm`], as it is afterwards.
    Set {
        /// Which.
        vm: String,
        /// The changes.
        #[serde(flatten)]
        changes: Settings,
    },
    /// Takes a guest that somebody else started under management. Answer: [`Answer::Vm`].
    Attach {
        /// Which guest.
        target: Target,
        /// What differs from the configuration.
        #[serde(flatten)]
        settings: Settings,
    },
    /// Leaves a guest to itself. Its pages stay as they are. Answer: [`Answer::Done`].
    Detach {
        /// Which.
        vm: String,
    },
    /// Reads the configuration file again. Answer: [`Answer::Done`], or the mistake in it, and nothing is changed.
    Reload,
    /// A process of ours tells of its own VM: the first line on a connection, which stays open for as long as the VM runs. It then
    /// writes a [`Request::Status`] at least every second. Answer: [`Answer::Limits`].
    Register {
        /// All about it.
        vm: Box<VmView>,
    },
    /// How a registered VM is now. Answer: [`Answer::Limits`], what it may do until the next.
    Status {
        /// All about it.
        vm: Box<VmView>,
    },
    /// A libvirt domain is about to start and wants room in the pool. Answer: [`Answer::Done`], or why there is none.
    Prepare {
        /// Its name.
        domain: String,
        /// Its UUID.
        uuid: String,
        /// What it takes of which pool.
        pages: Vec<PoolRequest>,
        /// Its memory on ordinary pages, where it asks for a guarantee.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        ordinary: Option<OrdinaryMemory>,
    },
    /// A libvirt domain runs, as libvirt's hook tells when it has started and when libvirtd was restarted. It is taken under management
    /// where the configuration says so, or where `settings` ask for it; one that somebody detached stays detached. Answer:
    /// [`Answer::Done`], whether it was taken or not.
    Started {
        /// Its name.
        domain: String,
        /// Its UUID.
        uuid: String,
        /// The process that is this domain, by libvirt's word.
        pid: u32,
        /// What its metadata say. Where something was said before, by metadata or over the socket, that counts more.
        #[serde(flatten)]
        settings: Settings,
        /// What in its metadata is wrong, a line each: it is not in `settings`.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        mistakes: Vec<String>,
    },
    /// A libvirt domain is gone: room that was made for it goes back. Answer: [`Answer::Done`].
    Release {
        /// Its name.
        domain: String,
        /// Its UUID.
        uuid: String,
    },
}

/// Memory of a domain that no pool provides, and how much of it has to become large pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OrdinaryMemory {
    /// The most that the guest may have of it, in bytes.
    pub bytes: ByteCount,
    /// How much of that has to be in large pages, in bytes.
    pub large_bytes: ByteCount,
}

/// Pages of a pool, on one NUMA node or on any.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolRequest {
    /// Size of a page in bytes: 2 MiB or 1 GiB.
    pub page_bytes: u64,
    /// How many.
    pub pages: u64,
    /// Where; `None`: anywhere.
    #[serde(default)]
    pub node: Option<u32>,
}

/// Room in the pools for one libvirt domain. The daemon's state file has rooms with the same fields, and more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoomView {
    /// Of the domain.
    pub uuid: String,
    /// Of the domain.
    pub domain: String,
    /// What it takes of the pools.
    pub wanted: Vec<PoolRequest>,
    /// Whether it has come for it, or will not come any more. Until then free pages are kept for it.
    pub has_started: bool,
}

impl RoomView {
    /// Free pages of that size that are kept for it, which may be on that node; `None`: on any.
    pub fn kept(&self, page_bytes: u64, node: Option<u32>) -> u64 {
        let may_be_there = |of: &&PoolRequest| of.node == node || of.node.is_none() || node.is_none();
        let wanted = self.wanted.iter().filter(|of| !self.has_started && of.page_bytes == page_bytes);
        wanted.filter(may_be_there).fold(0, |sum: u64, of| sum.saturating_add(of.pages))
    }
}

/// A guest that somebody else started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    /// The process that runs it.
    Pid(u32),
    /// A libvirt domain, by name or UUID.
    Domain(String),
    /// The process behind a QMP socket of QEMU's, and the socket is used to ask it.
    Qmp(std::path::PathBuf),
}

/// What may be said about one VM; `None` leaves it as it is, or as the configuration says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// A policy as on the command line (`auto`, `coverage:…`), or `off`: nothing is done, the VM is only looked at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// What it is to reach: `best-effort`, or a share like `95%`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guarantee: Option<String>,
    /// Whether shared memory (shmem, memfd) may be collapsed, which stops the guest for 15 to 30 ms a window.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub collapse_shared: Option<bool>,
    /// A QMP socket to ask, where the guest has one that nobody else is connected to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qmp: Option<std::path::PathBuf>,
    /// What is no longer said, and is as the configuration says.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unset: Vec<SettingName>,
}

/// One of [`Settings`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SettingName {
    /// `policy`.
    Policy,
    /// `guarantee`.
    Guarantee,
    /// `collapse_shared`.
    CollapseShared,
    /// `qmp`.
    Qmp,
}

/// One line of the daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply<A = Answer> {
    /// It was done.
    Ok(Box<A>),
    /// It was not: one line, what and why and what to do.
    Error(String),
    /// It was done, and could not be written down: it is lost when the daemon ends, unless the daemon can write by
    /// then. One line: why.
    Unsaved(String),
}

/// What is replied where all is well.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// Nothing to say.
    Done,
    /// To [`Request::Daemon`].
    Daemon(DaemonView),
    /// To [`Request::List`].
    Vms(Vec<VmView>),
    /// To [`Request::Rooms`].
    Rooms(Vec<RoomView>),
    /// To whatever is about one.
    Vm(Box<VmView>),
    /// To [`Request::Explain`].
    Explanation(Explanation),
    /// To [`Request::Windows`].
    Windows(WindowMap),
    /// To [`Request::Register`] and [`Request::Status`].
    Limits(Limits),
}

/// What a registered VM may do until it asks again, and what was set for it meanwhile.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Guest memory that may be copied per second.
    pub copy_per_second: u64,
    /// Share of a core that actions may take, in ten thousandths.
    pub cpu_share: u32,
    /// The policy that somebody asked for since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
}
