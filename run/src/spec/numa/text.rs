//! The written form of a cell: `id=0,cpus=[0-1],memory=2G,host-nodes=[0],policy=bind,host-cpus=[4-7],distances=[1@21]`,
//! `latencies=[0@90,1@140]` and `bandwidths=host`.

use std::str::FromStr;

use wideleaf_memory::numa::placement::MemoryMode;
use wideleaf_policies::{Bytes, CpuList, NodeSet, PageSize};
use wideleaf_vmm::cells::{BANDWIDTH_MB_S_MAX, LATENCY_NS_MAX};

use super::{CellSpec, Figures};

/// A value of `--numa`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NumaArg {
    /// The node with room for the whole guest.
    Auto,
    /// The kernel chooses the nodes.
    Off,
    /// One of the cells.
    Cell(Box<CellSpec>),
}

/// A text that is no cell.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CellError {
    /// A part that is no `key=value`.
    #[error("{0:?} is not a key with a value: write it as in id=0,cpus=[0-1],memory=2G,host-nodes=[0]")]
    NoValue(String),
    /// A key that no cell has.
    #[error(
        "there is no key {0:?}: the keys are id, cpus, memory, host-nodes, policy, host-cpus, page-size, distances, \
         latencies and bandwidths"
    )]
    UnknownKey(String),
    /// A key of other programs for something that all RAM has in common here.
    #[error("{0}= cannot differ between cells: all of a guest's RAM has one backing; use --backing and --host-page")]
    OfAllRam(String),
    /// A key twice.
    #[error("{0}= is there twice")]
    Twice(&'static str),
    /// A cell without a number.
    #[error("id= is missing: number the cells from 0")]
    NoId,
    /// A value that its key does not take.
    #[error("{key}={value}: {why}")]
    Value {
        /// Key of the value.
        key: &'static str,
        /// Value that is refused.
        value: String,
        /// Reason of the refusal.
        why: String,
    },
}

impl FromStr for NumaArg {
    type Err = CellError;

    fn from_str(text: &str) -> Result<NumaArg, CellError> {
        match text {
            "auto" => Ok(NumaArg::Auto),
            "off" => Ok(NumaArg::Off),
            text => text.parse().map(Box::new).map(NumaArg::Cell),
        }
    }
}

impl FromStr for CellSpec {
    type Err = CellError;

    fn from_str(text: &str) -> Result<CellSpec, CellError> {
        let (mut id, mut cpus, mut memory, mut host_nodes) = (None, None, None, None);
        let (mut policy, mut host_cpus, mut distances) = (None, None, None);
        let (mut page_size, mut latencies_ns, mut bandwidths_mb_s) = (None, None, None);
        for part in parts(text) {
            let (key, value) = part.split_once('=').ok_or_else(|| CellError::NoValue(part.to_owned()))?;
            // The second name of a key is Cloud Hypervisor's or QEMU's.
            match key {
                "id" | "guest_numa_id" | "nodeid" => put(&mut id, "id", value, number)?,
                "cpus" => put(&mut cpus, "cpus", value, list)?,
                "memory" | "size" | "mem" => put(&mut memory, "memory", value, |text| Bytes::parse(text).map_err(say))?,
                "host-nodes" | "host_numa_node" => put(&mut host_nodes, "host-nodes", value, some_nodes)?,
                "policy" => put(&mut policy, "policy", value, mode)?,
                "host-cpus" => put(&mut host_cpus, "host-cpus", value, some_cpus)?,
                "distances" => put(&mut distances, "distances", value, distance_list)?,
                "latencies" => put(&mut latencies_ns, "latencies", value, latencies)?,
                "bandwidths" => put(&mut bandwidths_mb_s, "bandwidths", value, bandwidths)?,
                "page-size" => put(&mut page_size, "page-size", value, |text| PageSize::parse(text).map_err(say))?,
                "backing" | "memdev" | "memory_zones" | "hugepages" | "hugepage_size" | "host-page" => {
                    return Err(CellError::OfAllRam(key.to_owned()));
                }
                other => return Err(CellError::UnknownKey(other.to_owned())),
            }
        }
        let (policy, distances) = (policy.unwrap_or_default(), distances.unwrap_or_default());
        Ok(CellSpec {
            id: id.ok_or(CellError::NoId)?,
            cpus,
            memory,
            host_nodes,
            policy,
            host_cpus,
            page_size,
            distances,
            latencies_ns,
            bandwidths_mb_s,
        })
    }
}

/// The parts of a text between commas outside brackets.
fn parts(text: &str) -> Vec<&str> {
    let mut depth = 0_u32;
    let is_border = |letter: char| {
        match letter {
            '[' => depth += 1,
            ']' => depth = depth.saturating_sub(1),
            _ => {}
        }
        letter == ',' && depth == 0
    };
    text.split(is_border).collect()
}

/// Reads the value of a key that may be there once.
fn put<T>(
    to: &mut Option<T>,
    key: &'static str,
    value: &str,
    read: impl FnOnce(&str) -> Result<T, String>,
) -> Result<(), CellError> {
    let read = read(value).map_err(|why| CellError::Value { key, value: value.to_owned(), why })?;
    if to.replace(read).is_some() { Err(CellError::Twice(key)) } else { Ok(()) }
}

fn say(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn number(text: &str) -> Result<u16, String> {
    text.parse().map_err(|_| "write a number from 0".to_owned())
}

/// The content of brackets, which may be left out around one number or range.
fn bare(text: &str) -> &str {
    text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text)
}

fn list<T: FromStr<Err: std::fmt::Display>>(text: &str) -> Result<T, String> {
    bare(text).parse().map_err(say)
}

fn some_nodes(text: &str) -> Result<NodeSet, String> {
    let nodes: NodeSet = list(text)?;
    if nodes.is_empty() { Err("name at least one node".to_owned()) } else { Ok(nodes) }
}

fn some_cpus(text: &str) -> Result<CpuList, String> {
    let cpus: CpuList = list(text)?;
    if cpus.is_empty() { Err("name at least one CPU".to_owned()) } else { Ok(cpus) }
}

fn mode(text: &str) -> Result<MemoryMode, String> {
    MemoryMode::by_name(text).ok_or_else(|| "use bind, preferred or interleave".to_owned())
}

fn distance_list(text: &str) -> Result<Vec<(u16, u8)>, String> {
    let distance = |part: &str| {
        let (to, far) = part.split_once('@').ok_or("write CELL@DISTANCE, as in [1@21]")?;
        let far = far.parse().map_err(|_| "a distance is a number up to 254")?;
        Ok((to.parse().map_err(|_| "write CELL@DISTANCE, as in [1@21]")?, far))
    };
    let all: Result<Vec<_>, &str> = bare(text).split(',').map(distance).collect();
    all.map_err(str::to_owned)
}

fn latencies(text: &str) -> Result<Figures, String> {
    figures(text, u32::from(LATENCY_NS_MAX))
        .ok_or_else(|| format!("write host, or CELL@NS with 1 to {LATENCY_NS_MAX} nanoseconds, as in [0@90,1@140]"))
}

fn bandwidths(text: &str) -> Result<Figures, String> {
    figures(text, BANDWIDTH_MB_S_MAX)
        .ok_or_else(|| format!("write host, or CELL@MB with 1 to {BANDWIDTH_MB_S_MAX} MB/s, as in [0@40000,1@20000]"))
}

/// The figures of a list `[CELL@FIGURE,...]`, each from 1 to `max`.
fn figures(text: &str, max: u32) -> Option<Figures> {
    if text == "host" {
        return Some(Figures::Host);
    }
    let figure = |part: &str| {
        let (to, figure) = part.split_once('@')?;
        let figure = figure.parse().ok().filter(|figure| (1..=max).contains(figure))?;
        Some((to.parse().ok()?, figure))
    };
    bare(text).split(',').map(figure).collect::<Option<_>>().map(Figures::Cells)
}

#[cfg(test)]
mod tests {
    use super::*;
    use wideleaf_policies::units::gib;

    fn cell(text: &str) -> CellSpec {
        text.parse().expect("it is a cell")
    }

    fn refused(text: &str) -> String {
        text.parse::<CellSpec>().expect_err("it is no cell").to_string()
    }

    #[test]
    fn a_cell_is_read_with_all_its_keys() {
        let text =
            "id=1,cpus=[0-1,4],memory=2G,host-nodes=[0,2],policy=interleave,host-cpus=[8-11],distances=[0@21,2@31]";
        let CellSpec { id, cpus, memory, host_nodes, policy, host_cpus, distances, latencies_ns, .. } = cell(text);
        assert_eq!((id, memory, policy), (1, Some(gib(2)), MemoryMode::Interleave));
        let shown = [cpus.map(|list| list.to_string()), host_nodes.map(|list| list.to_string())];
        assert_eq!(shown.map(Option::unwrap_or_default), ["0-1,4", "0,2"]);
        assert_eq!(host_cpus.map(|list| list.to_string()).as_deref(), Some("8-11"));
        assert_eq!((distances, latencies_ns), (vec![(0, 21), (2, 31)], None));
    }

    #[test]
    fn figures_are_a_list_or_the_hosts() {
        let CellSpec { latencies_ns, bandwidths_mb_s, .. } = cell("id=0,latencies=[0@90,1@140],bandwidths=host");
        assert_eq!(latencies_ns, Some(Figures::Cells(vec![(0, 90), (1, 140)])));
        assert_eq!(bandwidths_mb_s, Some(Figures::Host));
        assert_eq!(cell("id=0,page-size=2m").page_size, Some(PageSize::Huge2M));
    }

    #[test]
    fn names_of_other_programs_mean_the_same() {
        let ours = cell("id=0,cpus=0-1,memory=1G,host-nodes=1");
        assert_eq!(cell("guest_numa_id=0,cpus=[0-1],size=1G,host_numa_node=1"), ours);
        assert_eq!(cell("nodeid=0,cpus=0-1,mem=1G,host-nodes=1,policy=bind"), ours);
        assert_eq!("off".parse(), Ok(NumaArg::Off));
        assert_eq!("auto".parse(), Ok(NumaArg::Auto));
    }

    #[test]
    fn a_text_that_is_no_cell_is_refused_with_its_part() {
        let cases = [
            ("id", "\"id\" is not a key with a value"),
            ("cpus=0", "id= is missing: number the cells from 0"),
            ("id=0,id=1", "id= is there twice"),
            ("id=-1", "id=-1: write a number from 0"),
            ("id=0,colour=1", "there is no key \"colour\": the keys are id, cpus, memory"),
            ("id=0,cpus=[a]", "cpus=[a]: \"a\" is not a list of numbers"),
            ("id=0,memory=much", "memory=much: "),
            ("id=0,host-nodes=[]", "host-nodes=[]: name at least one node"),
            ("id=0,host-cpus=[]", "host-cpus=[]: name at least one CPU"),
            ("id=0,policy=strict", "policy=strict: use bind, preferred or interleave"),
            ("id=0,distances=[1]", "distances=[1]: write CELL@DISTANCE"),
            ("id=0,distances=[1@999]", "distances=[1@999]: a distance is a number up to 254"),
            ("id=0,latencies=[0]", "latencies=[0]: write host, or CELL@NS with 1 to 65534 nanoseconds, as in [0@90"),
            ("id=0,latencies=[0@0]", "latencies=[0@0]: write host, or"),
            ("id=0,latencies=[0@65535]", "latencies=[0@65535]: write host, or"),
            ("id=0,bandwidths=fast", "bandwidths=fast: write host, or CELL@MB with 1 to 1000000000 MB/s"),
            ("id=0,latencies=host,latencies=host", "latencies= is there twice"),
            ("id=0,backing=hugetlb", "backing= cannot differ between cells: all of a guest's RAM has one backing"),
            ("id=0,hugepages=on", "one backing; use --backing and --host-page"),
            ("id=0,page-size=3m", "page-size=3m: "),
        ];
        for (text, why) in cases {
            assert!(refused(text).contains(why), "{text}: {}", refused(text));
        }
    }
}
