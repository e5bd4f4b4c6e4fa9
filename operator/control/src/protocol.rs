//! Requests and replies. A client writes one [`Envelope`] as one line of JSON and reads one [`Reply`] as one line.
//! It may then send the next request on the same connection. Readers ignore unknown fields, so a version may gain
//! fields. A change to the meaning of a field raises [`VERSION`].

use serde::{Deserialize, Serialize};

use crate::view::{ByteCount, DaemonView, Explanation, VmView, WindowMap};

/// Version of the protocol on the socket. A daemon refuses any other, and names its own in the text.
pub const VERSION: u32 = 1;

/// Default path of the daemon's socket.
pub const SOCKET_PATH: &str = "/run/wideleaf/control.sock";

/// Upper bound on a line, in bytes: the map of a VM of 4 TiB has 2 million windows, a byte or two each. A reader
/// ends the connection with a longer one.
pub const LINE_BYTES_MAX: usize = 8 << 20;

/// Longest time for which a client may have a guest left alone, in seconds: an hour, more than a migration takes.
pub const LEFT_ALONE_S_MAX: u64 = 3600;

/// Words in each refusal that holds for a moment alone: the same request may well succeed a moment later.
pub const ASK_AGAIN: &str = "ask again in a moment";

/// One line from a client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Envelope<R = Request> {
    /// [`VERSION`], or that of another protocol of lines.
    pub version: u32,
    /// The request itself.
    #[serde(flatten)]
    pub request: R,
}

impl From<Request> for Envelope {
    fn from(request: Request) -> Envelope {
        Envelope { version: VERSION, request }
    }
}

/// Request of a client. `vm`: a name, a process id or a libvirt UUID, as `wideleaf list` shows them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case")]
pub enum Request {
    /// Asks about the daemon itself. Answer: [`Answer::Daemon`].
    Daemon,
    /// Lists all known VMs. Answer: [`Answer::Vms`].
    List,
    /// Lists the room in the hugetlb pools that was made for libvirt domains. Answer: [`Answer::Rooms`].
    Rooms,
    /// Describes one VM. Answer: [`Answer::Vm`].
    Info {
        /// Name, process id or UUID of the VM.
        vm: String,
    },
    /// Explains why windows of a VM are not huge. Answer: [`Answer::Explanation`].
    Explain {
        /// Name, process id or UUID of the VM.
        vm: String,
    },
    /// Shows what backs every window of a VM. Answer: [`Answer::Windows`].
    Windows {
        /// Name, process id or UUID of the VM.
        vm: String,
    },
    /// Changes the settings of a managed VM. Answer: [`Answer::Vm`], as it is afterwards.
    Set {
        /// Name, process id or UUID of the VM.
        vm: String,
        /// Settings that change.
        #[serde(flatten)]
        changes: Settings,
    },
    /// Takes an external guest under management. Answer: [`Answer::Vm`].
    Attach {
        /// Guest to attach to.
        target: Target,
        /// Settings that differ from the configuration.
        #[serde(flatten)]
        settings: Settings,
    },
    /// Ends the management of a guest. Its pages stay as they are. Answer: [`Answer::Done`].
    Detach {
        /// Name, process id or UUID of the VM.
        vm: String,
    },
    /// Leaves a managed guest alone for a time: its manager changes no page until then. A later request replaces an
    /// earlier one, and the end of the daemon ends it. Answer: [`Answer::Vm`], as it is afterwards.
    LeaveAlone {
        /// Name, process id or UUID of the VM.
        vm: String,
        /// Time in seconds, at most [`LEFT_ALONE_S_MAX`]; 0 ends it now.
        for_s: u64,
    },
    /// Reads the configuration file again. Answer: [`Answer::Done`]. A mistake in the file is the reply instead,
    /// and nothing changes.
    Reload,
    /// A `wideleaf run` process registers its own VM. This is the first line on a connection that stays open while
    /// the VM runs. The process then writes a [`Request::Status`] at least every second. Answer: [`Answer::Limits`].
    Register {
        /// Full description of the VM.
        vm: Box<VmView>,
        /// Its windows, as its own manager knows them.
        #[serde(flatten)]
        live: LiveReport,
    },
    /// Current state of a registered VM. Answer: [`Answer::Limits`], which hold until the next status.
    Status {
        /// Full description of the VM.
        vm: Box<VmView>,
        /// Its windows, as its own manager knows them.
        #[serde(flatten)]
        live: LiveReport,
    },
    /// A libvirt domain is about to start and wants room in the pool. Answer: [`Answer::Done`], or why there
    /// is no room.
    Prepare {
        /// Name of the domain.
        domain: String,
        /// UUID of the domain.
        uuid: String,
        /// Pages that the domain takes, by pool.
        pages: Vec<PoolRequest>,
        /// Memory on ordinary pages, for a domain that asks for a guarantee.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        ordinary: Option<OrdinaryMemory>,
    },
    /// A libvirt domain runs. Libvirt's hook reports this when the domain has started and when libvirtd was
    /// restarted. The daemon takes the domain under management where the configuration says so, or where `settings`
    /// ask for it. A domain that an operator detached stays detached. Answer: [`Answer::Done`], whether it was
    /// taken or not.
    Started {
        /// Name of the domain.
        domain: String,
        /// UUID of the domain.
        uuid: String,
        /// Process that runs this domain, according to libvirt.
        pid: u32,
        /// Settings from the domain's metadata. Earlier settings, by metadata or over the socket, take precedence.
        #[serde(flatten)]
        settings: Settings,
        /// Mistakes in the domain's metadata, a line each. They are not in `settings`.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        mistakes: Vec<String>,
        /// OpenStack Nova's flavor of the instance, from the domain's metadata; `None` for other domains.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        flavor: Option<String>,
    },
    /// A libvirt domain is gone: the room that was made for it goes back. Answer: [`Answer::Done`].
    Release {
        /// Name of the domain.
        domain: String,
        /// UUID of the domain.
        uuid: String,
    },
}

/// Windows of a registered VM, as its own manager knows them. All are left out by runs of earlier releases.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LiveReport {
    /// Reasons why windows are not huge.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub explanation: Option<Box<Explanation>>,
    /// All windows, where the latest [`Limits::wants_windows`] asked for them. A map without ranges, with a note, where
    /// it is too long for a request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub windows: Option<Box<WindowMap>>,
    /// Bids for huge pages, while they are short.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bids: Option<Box<BidsReport>>,
}

/// Bids of a VM for huge pages, while they are short on its host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BidsReport {
    /// Number of huge pages in blocks that became free since the kernel refused one to the VM's manager; `None` where
    /// it has refused none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub free: Option<u64>,
    /// Windows by benefit, ascending: cycles per second that a huge page saves in each, the number of windows that want
    /// one, and of windows that hold one and could give it back.
    pub levels: Vec<(u64, u32, u32)>,
}

/// Price of huge pages for one VM, while they are short on its host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PriceOfHugePage {
    /// Benefit below which a window gets no huge page, in cycles per second.
    pub cycles_per_s: u64,
    /// Number of windows that may give their huge page back for other VMs, beyond those of earlier replies.
    pub may_vacate: u64,
    /// Number of huge pages that are free on the host, for all bidders; `None` from daemons of earlier releases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub free: Option<u64>,
}

/// Memory of a domain outside the pools, and how much of it has to become large pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OrdinaryMemory {
    /// Upper bound on this memory, in bytes.
    pub bytes: ByteCount,
    /// Part of it that has to be in large pages, in bytes.
    pub large_bytes: ByteCount,
}

/// Pages of a pool, on one NUMA node, on some, or on any.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolRequest {
    /// Size of a page in bytes: 2 MiB or 1 GiB.
    pub page_bytes: u64,
    /// Number of pages.
    pub pages: u64,
    /// NUMA node of the pages; `None`: those of `nodes`, or any node.
    #[serde(default)]
    pub node: Option<u32>,
    /// NUMA nodes that may have the pages together, without `node`; empty: any node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<u32>,
}

impl PoolRequest {
    /// Nodes that may have the pages; `None`: any node.
    pub fn on_nodes(&self) -> Option<&[u32]> {
        match &self.node {
            Some(node) => Some(std::slice::from_ref(node)),
            None => Some(self.nodes.as_slice()).filter(|nodes| !nodes.is_empty()),
        }
    }

    /// Whether a page of these nodes may be for it; `None`: of any node.
    pub fn may_be_on(&self, nodes: Option<&[u32]>) -> bool {
        match (self.on_nodes(), nodes) {
            (Some(own), Some(others)) => own.iter().any(|node| others.contains(node)),
            (None, _) | (_, None) => true,
        }
    }
}

/// Room in the pools for one libvirt domain. The daemon's state file has rooms with the same fields, and more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoomView {
    /// UUID of the domain.
    pub uuid: String,
    /// Name of the domain.
    pub domain: String,
    /// Pages that the domain takes from the pools.
    pub wanted: Vec<PoolRequest>,
    /// Whether the domain has taken its pages, or will never do so. Until then free pages are kept for it.
    pub has_started: bool,
}

impl RoomView {
    /// Free pages of that size that are kept for the domain and may be on that node; `None`: on any.
    pub fn kept(&self, page_bytes: u64, node: Option<u32>) -> u64 {
        let node = node.as_ref().map(std::slice::from_ref);
        let may_be_there = |of: &&PoolRequest| of.may_be_on(node);
        let wanted = self.wanted.iter().filter(|of| !self.has_started && of.page_bytes == page_bytes);
        wanted.filter(may_be_there).fold(0, |sum: u64, of| sum.saturating_add(of.pages))
    }
}

/// A guest of another VMM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    /// Process that runs the guest.
    Pid(u32),
    /// A libvirt domain, by name or UUID.
    Domain(String),
    /// The process behind a QMP socket of QEMU. The daemon also sends its questions over this socket.
    Qmp(std::path::PathBuf),
}

/// Settings of one VM. `None` leaves a setting as it is, or as the configuration says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// A policy as on the command line (`auto`, `coverage:…`), or `off`: the daemon only observes the VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// Coverage that the VM should reach: `bestEffort`, or a share like `guaranteed:95%`, `bestEffort:95%` or `95%`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guarantee: Option<String>,
    /// Largest part of any 100 ms for which the VM's memory may be out of its reach while page sizes change: `1%` to
    /// `100%`, which is no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub out_of_reach: Option<String>,
    /// Whether shared memory (shmem, memfd) may be collapsed, which stops the guest for 15 to 30 ms a window.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub collapse_shared: Option<bool>,
    /// A QMP socket for questions, for a guest that has one with no other client.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qmp: Option<std::path::PathBuf>,
    /// Settings to remove, which then are as the configuration says.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unset: Vec<SettingName>,
}

/// Name of one of the [`Settings`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SettingName {
    /// The setting `policy`.
    Policy,
    /// The setting `guarantee`.
    Guarantee,
    /// The setting `out_of_reach`.
    OutOfReach,
    /// The setting `collapse_shared`.
    CollapseShared,
    /// The setting `qmp`.
    Qmp,
}

/// One line from the daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply<A = Answer> {
    /// The request was carried out.
    Ok(Box<A>),
    /// The request failed. One line: what, why and what to do.
    Error(String),
    /// The request was carried out but not saved. The change is lost when the daemon ends, unless the daemon can
    /// write by then. One line: why.
    Unsaved(String),
}

/// Content of a reply to a request that succeeded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// Success without further content.
    Done,
    /// Reply to [`Request::Daemon`].
    Daemon(DaemonView),
    /// Reply to [`Request::List`].
    Vms(Vec<VmView>),
    /// Reply to [`Request::Rooms`].
    Rooms(Vec<RoomView>),
    /// Reply to requests about one VM.
    Vm(Box<VmView>),
    /// Reply to [`Request::Explain`].
    Explanation(Explanation),
    /// Reply to [`Request::Windows`].
    Windows(WindowMap),
    /// Reply to [`Request::Register`] and [`Request::Status`].
    Limits(Limits),
}

/// Limits of a registered VM until its next status, and changes since the last one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Guest memory that may be copied per second, in bytes.
    pub copy_per_second: u64,
    /// Share of a core that actions may take, in ten thousandths.
    pub cpu_share: u32,
    /// Largest part of any 100 ms for which the VM's memory may be out of its reach, as in [`Settings`]; `None` from
    /// daemons of earlier releases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub out_of_reach: Option<String>,
    /// Policy that an operator has set since the last status.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// Policy to which the run returns without this daemon: there while the daemon pursues a guarantee by another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub own_policy: Option<String>,
    /// Whether the next statuses should have the VM's windows: a client looks at them.
    #[serde(default, skip_serializing_if = "is_false")]
    pub wants_windows: bool,
    /// Price of huge pages; `None` while they are not short, and from daemons of earlier releases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub huge_page: Option<PriceOfHugePage>,
    /// Number of huge pages that the daemon has made free for this VM since the last status, and that `/proc/buddyinfo`
    /// does not count; 0 from daemons of earlier releases.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub free_huge_pages: u64,
}

const fn is_zero(value: &u64) -> bool {
    *value == 0
}

const fn is_false(value: &bool) -> bool {
    !*value
}
