//! NUMA in the specification of a run: nothing is asked of the host yet.

use serde::{Deserialize, Serialize};
use wideleaf_memory::numa::placement::MemoryMode;
use wideleaf_policies::{Bytes, CpuList, NodeSet, PageSize};

use super::form;

mod text;

pub use text::{CellError, NumaArg};

/// Figures of a cell's vCPUs at the memory of cells.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Figures {
    /// Those that this host's firmware tells of the nodes of the cells.
    Host,
    /// A figure for each of these cells, by their numbers.
    Cells(Vec<(u16, u32)>),
}

/// NUMA of a guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NumaSpec {
    /// The node with room for the whole guest, where the host has several.
    #[default]
    Auto,
    /// Nothing: the kernel chooses the nodes.
    Off,
    /// These cells, in the order of their numbers.
    Cells(Vec<CellSpec>),
}

impl NumaSpec {
    /// Whether nothing was asked for.
    pub fn is_auto(&self) -> bool {
        *self == NumaSpec::Auto
    }

    /// The cells that were asked for.
    pub fn cells(&self) -> &[CellSpec] {
        match self {
            NumaSpec::Cells(cells) => cells,
            NumaSpec::Auto | NumaSpec::Off => &[],
        }
    }
}

/// A cell of the guest, and its place on the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CellSpec {
    /// Number of the cell, from 0.
    pub id: u16,
    /// Numbers of its vCPUs, as a list; `None`: all, for the only cell.
    #[serde(default, with = "form::optional", skip_serializing_if = "Option::is_none")]
    pub cpus: Option<CpuList>,
    /// Size of its memory; `None`: all, for the only cell.
    #[serde(default, with = "form::optional", skip_serializing_if = "Option::is_none", rename = "memory_bytes")]
    pub memory: Option<Bytes>,
    /// Nodes of the host for its memory; `None`: the kernel chooses.
    #[serde(default, with = "form::optional", skip_serializing_if = "Option::is_none")]
    pub host_nodes: Option<NodeSet>,
    /// Memory policy for these nodes.
    #[serde(default, with = "form::scalar")]
    pub policy: MemoryMode,
    /// CPUs of the host for its vCPUs; `None`: those of its nodes, if it has nodes.
    #[serde(default, with = "form::optional", skip_serializing_if = "Option::is_none")]
    pub host_cpus: Option<CpuList>,
    /// Page size that its memory starts with; `None`: that of all RAM.
    #[serde(default, with = "form::optional", skip_serializing_if = "Option::is_none")]
    pub page_size: Option<PageSize>,
    /// Distances to other cells, by their numbers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub distances: Vec<(u16, u8)>,
    /// Latencies from its vCPUs to the memory of cells, in nanoseconds; `None`: the guest is told none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latencies_ns: Option<Figures>,
    /// Bandwidths between its vCPUs and the memory of cells, in MB/s; `None`: the guest is told none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidths_mb_s: Option<Figures>,
}
