//! NUMA nodes of the host, and lists of numbers as the kernel writes them (`0-1,3`).

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;
use core::str::FromStr;

/// Number of a NUMA node, as in `/sys/devices/system/node/nodeN`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u16);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node {}", self.0)
    }
}

/// The highest number of nodes that Linux can be built for on x86-64 (`CONFIG_NODES_SHIFT` 10).
pub const NODES_MAX: u16 = 1024;

/// Number of 64-bit words of a set of nodes.
pub const NODE_WORDS: usize = NODES_MAX as usize / 64;

/// Nodes of the host, any of up to [`NODES_MAX`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeSet([u64; NODE_WORDS]);

impl NodeSet {
    /// The set without a node.
    pub const EMPTY: NodeSet = NodeSet([0; NODE_WORDS]);

    /// The set of this node.
    ///
    /// # Panics
    /// If its number is not below [`NODES_MAX`].
    pub fn of(node: NodeId) -> NodeSet {
        let mut set = NodeSet::EMPTY;
        set.insert(node);
        set
    }

    /// Adds a node.
    ///
    /// # Panics
    /// If its number is not below [`NODES_MAX`].
    pub fn insert(&mut self, node: NodeId) {
        self.0[usize::from(node.0) / 64] |= 1 << (node.0 % 64);
    }

    /// Whether the node is in the set.
    pub fn contains(&self, node: NodeId) -> bool {
        self.0.get(usize::from(node.0) / 64).is_some_and(|word| word >> (node.0 % 64) & 1 == 1)
    }

    /// Whether no node is in the set.
    pub fn is_empty(&self) -> bool {
        self.0 == [0; NODE_WORDS]
    }

    /// Number of its nodes.
    pub fn len(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// The nodes, ascending.
    pub fn iter(&self) -> impl Iterator<Item = NodeId> + '_ {
        (0..NODES_MAX).map(NodeId).filter(|node| self.contains(*node))
    }

    /// The nodes of either set.
    #[must_use]
    pub fn union(&self, other: &NodeSet) -> NodeSet {
        NodeSet(core::array::from_fn(|word| self.0[word] | other.0[word]))
    }

    /// The nodes of this set that are not in the other.
    #[must_use]
    pub fn without(&self, other: &NodeSet) -> NodeSet {
        NodeSet(core::array::from_fn(|word| self.0[word] & !other.0[word]))
    }

    /// The bits, as system calls take them: node 0 is the lowest bit of the first word.
    pub fn words(&self) -> &[u64; NODE_WORDS] {
        &self.0
    }
}

impl FromIterator<NodeId> for NodeSet {
    fn from_iter<T: IntoIterator<Item = NodeId>>(nodes: T) -> NodeSet {
        let mut set = NodeSet::EMPTY;
        nodes.into_iter().for_each(|node| set.insert(node));
        set
    }
}

/// The kernel's list format: `0-1,3`. Nothing for the empty set.
impl fmt::Display for NodeSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        show_list(f, self.iter().map(|node| node.0))
    }
}

impl FromStr for NodeSet {
    type Err = ListError;

    fn from_str(text: &str) -> Result<NodeSet, ListError> {
        Ok(parse_list(text, NODES_MAX)?.into_iter().map(NodeId).collect())
    }
}

/// The highest number of CPUs that Linux can be built for on x86-64 (`CONFIG_NR_CPUS`, `MAXSMP`).
pub const CPUS_MAX: u16 = 8192;

/// CPUs of a host or of a guest, ascending, none twice.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CpuList(Vec<u16>);

impl CpuList {
    /// Number of the CPUs.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether no CPU is in the list.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether the CPU is in the list.
    pub fn contains(&self, cpu: u16) -> bool {
        self.0.binary_search(&cpu).is_ok()
    }

    /// The CPUs, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u16> + '_ {
        self.0.iter().copied()
    }
}

impl FromIterator<u16> for CpuList {
    fn from_iter<T: IntoIterator<Item = u16>>(cpus: T) -> CpuList {
        let mut all: Vec<u16> = cpus.into_iter().collect();
        all.sort_unstable();
        all.dedup();
        CpuList(all)
    }
}

/// The kernel's list format: `0-1,3`. Nothing for no CPU.
impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        show_list(f, self.iter())
    }
}

impl FromStr for CpuList {
    type Err = ListError;

    fn from_str(text: &str) -> Result<CpuList, ListError> {
        Ok(parse_list(text, CPUS_MAX)?.into_iter().collect())
    }
}

/// A text that is no list of numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListError {
    /// A part that is neither a number nor a range.
    NotAList(String),
    /// A number beyond what the kernel can have.
    TooLarge {
        /// Number in the text.
        number: u64,
        /// First number that is too large.
        end: u16,
    },
}

impl fmt::Display for ListError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ListError::NotAList(part) => write!(f, "{part:?} is not a list of numbers: write it as in 0-1,3"),
            ListError::TooLarge { number, end } => write!(f, "{number} is too large: the numbers end at {}", end - 1),
        }
    }
}

impl core::error::Error for ListError {}

/// Reads `0-1,3`: numbers below `end`, in the order of the text. An empty text has none, as an empty file of the
/// kernel.
fn parse_list(text: &str, end: u16) -> Result<Vec<u16>, ListError> {
    let mut numbers = Vec::new();
    for part in text.trim().split(',').filter(|_| !text.trim().is_empty()) {
        let not_a_list = || ListError::NotAList(part.into());
        let number = |text: &str| {
            let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            let number: u64 =
                if is_number { text.parse().map_err(|_| not_a_list())? } else { return Err(not_a_list()) };
            u16::try_from(number).ok().filter(|number| *number < end).ok_or(ListError::TooLarge { number, end })
        };
        let (first, last) = match part.split_once('-') {
            Some((first, last)) => (number(first)?, number(last)?),
            None => (number(part)?, number(part)?),
        };
        if last < first {
            return Err(not_a_list());
        }
        numbers.extend(first..=last);
    }
    Ok(numbers)
}

/// Writes ascending numbers with their runs as ranges.
fn show_list(f: &mut fmt::Formatter<'_>, numbers: impl Iterator<Item = u16>) -> fmt::Result {
    let mut numbers = numbers.peekable();
    let mut separator = "";
    while let Some(first) = numbers.next() {
        let mut last = first;
        while let Some(next) = numbers.next_if(|next| *next == last + 1) {
            last = next;
        }
        match last - first {
            0 => write!(f, "{separator}{first}")?,
            _ => write!(f, "{separator}{first}-{last}")?,
        }
        separator = ",";
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString as _;

    #[test]
    fn a_list_is_shown_as_the_kernel_writes_it() {
        for (written, shown) in
            [("0-1,3", "0-1,3"), ("3,1,0", "0-1,3"), ("7\n", "7"), ("", ""), ("0,1,2,1023", "0-2,1023")]
        {
            let set: NodeSet = written.parse().expect("it is a list");
            assert_eq!(set.to_string(), shown);
        }
        let cpus: CpuList = "4-7,0,2-4".parse().expect("it is a list");
        assert_eq!((cpus.to_string().as_str(), cpus.len(), cpus.contains(3)), ("0,2-7", 7, true));
        assert!(!cpus.contains(1));
    }

    #[test]
    fn what_is_no_list_is_refused_with_the_part() {
        let refused = |text: &str| text.parse::<NodeSet>().expect_err("it is no list").to_string();
        for text in ["a", "1-", "-1", "1,,2", "3-1", "+1", "1 2", "0x1"] {
            assert!(refused(text).contains("is not a list of numbers: write it as in 0-1,3"), "{text}");
        }
        assert_eq!(refused("0-1024"), "1024 is too large: the numbers end at 1023");
        assert_eq!(refused("99999"), "99999 is too large: the numbers end at 1023");
    }

    #[test]
    fn sets_are_joined_and_taken_apart() {
        let set = |text: &str| text.parse::<NodeSet>().expect("it is a list");
        assert_eq!(set("0-1").union(&set("64,1")), set("0-1,64"));
        assert_eq!(set("0-3").without(&set("1,70")), set("0,2-3"));
        assert_eq!((set("63-65").len(), set("").is_empty(), NodeSet::of(NodeId(64))), (3, true, set("64")));
        assert_eq!(set("0,65").words()[..2], [1, 2]);
        assert!(!set("0").contains(NodeId(u16::MAX)));
    }
}
