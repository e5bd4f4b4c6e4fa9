//! The node agent of Kubernetes, and the kubectl plugin that shows what agents publish.
//!
//! ```text
//!   wideleafd ◀── control socket ── daemon ─┐                     ┌─▶ node: labels, wideleaf.io/huge-gib
//!   pods, VMIs of this node ─ watch ▶ store ├─▶ rounds ─▶ publish ┼─▶ VMI or pod: condition, annotation
//!   virt-handler ── gRPC ─────────▶ hooks ──┘   (one every 4 s)   └─▶ events
//! ```
//!
//! | module | what it is |
//! |---|---|
//! | [`options`] | options of the program, each also by environment |
//! | [`daemon`] | client of wideleafd's control socket |
//! | [`cgroup`], [`matching`] | the pod of a guest, and its VMI |
//! | [`objects`], [`store`], [`watch`] | the parts of pods and VMIs that count, kept up to date |
//! | [`annotations`] | annotations that ask for a policy or a guarantee |
//! | [`verdict`], [`details`] | the condition of a guest, and the annotation for programs |
//! | [`figures`] | whole GiB of a node that change seldom |
//! | [`publish`] | writes to the API server: seldom, and never over fields of other writers |
//! | [`rounds`] | the loop |
//! | [`forget`] | takes back what was written, after an uninstall |
//! | [`reason`] | why the API server could not be reached |
//! | [`hooks`] | KubeVirt's node hooks |
//! | [`health`], [`counters`] | `/healthz` and metrics |
//! | [`kubectl`] | the plugin |
//! | [`amounts`], [`table`] | text as the command line `wideleaf` shows it |
//!
//! The agent has no privilege on its node. It connects to wideleafd's socket and to the API server, and nothing else.

// The files of the command line, so that both show the same. That crate embeds the guest image and is no dependency.
#[path = "../../../cli/src/guests/amounts.rs"]
pub mod amounts;
pub mod annotations;
pub mod cgroup;
pub mod counters;
pub mod daemon;
pub mod details;
pub mod figures;
pub mod forget;
pub mod health;
pub mod hooks;
pub mod kubectl;
pub mod matching;
pub mod objects;
pub mod options;
pub mod publish;
pub mod reason;
pub mod rounds;
pub mod store;
#[path = "../../../cli/src/table.rs"]
pub mod table;
#[cfg(test)]
mod testing;
pub mod verdict;
pub mod watch;

/// Field manager and reporting component of all writes.
pub const MANAGER: &str = "wideleaf-node";

/// Prefix of all labels, annotations, resources and pod conditions of the agent.
pub const PREFIX: &str = "wideleaf.io/";
