//! Memory by NUMA node, from `/proc/PID/numa_maps` (numa_maps(7)): the node with most of a process's memory, where a
//! giant page is made for it, and the memory of some mappings by node, where single pages cannot be asked for. The
//! kernel walks all page tables of the process for that file.
//!
//! ```text
//!   7f0000000000 default anon=300 dirty=300 N0=100 N1=200 kernelpagesize_kB=4
//!                                           pages by node, of that size
//! ```

use wideleaf_policies::{Bytes, Hva};

/// The node with most memory; of equal ones the first. `None` if the text names none.
pub fn fullest_node(numa_maps: &str) -> Option<u32> {
    let kibibytes = kibibytes_by_node(numa_maps.lines());
    kibibytes.into_iter().max_by_key(|(node, sum)| (*sum, std::cmp::Reverse(*node))).map(|(node, _)| node)
}

/// Memory by node of the mappings that begin in one of these ranges, ascending by node.
pub fn bytes_by_node(numa_maps: &str, ranges: &[(Hva, Bytes)]) -> Vec<(u32, Bytes)> {
    let start = |line: &str| u64::from_str_radix(line.split_whitespace().next()?, 16).ok();
    let is_in = |at: u64| ranges.iter().any(|(first, bytes)| (first.get()..(*first + *bytes).get()).contains(&at));
    let lines = numa_maps.lines().filter(|line| start(line).is_some_and(is_in));
    let mut by_node = kibibytes_by_node(lines);
    by_node.sort_unstable();
    by_node.into_iter().map(|(node, kibibytes)| (node, Bytes::new(kibibytes.saturating_mul(1024)))).collect()
}

fn kibibytes_by_node<'a>(lines: impl Iterator<Item = &'a str>) -> Vec<(u32, u64)> {
    let mut kibibytes: Vec<(u32, u64)> = Vec::new();
    for line in lines {
        let words = || line.split_whitespace().filter_map(|word| word.split_once('='));
        let size = words().find_map(|(key, value)| (key == "kernelpagesize_kB").then(|| value.parse().ok())?);
        let Some(size): Option<u64> = size else { continue };
        for (key, pages) in words() {
            let node = key.strip_prefix('N').and_then(|node| node.parse().ok());
            let (Some(node), Ok(pages)) = (node, pages.parse::<u64>()) else { continue };
            let more = pages.saturating_mul(size);
            match kibibytes.iter_mut().find(|(known, _)| *known == node) {
                Some((_, sum)) => *sum = sum.saturating_add(more),
                None => kibibytes.push((node, more)),
            }
        }
    }
    kibibytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_count_by_their_size() {
        let text = "55d0 default file=/usr/bin/x mapped=6 N0=6 kernelpagesize_kB=4\n\
                    7f00 default anon=300 dirty=300 N0=300 kernelpagesize_kB=4\n\
                    7f40 default huge anon=2 dirty=2 N1=2 kernelpagesize_kB=2048\n";
        assert_eq!(fullest_node(text), Some(1), "4096 KiB on node 1, 1224 KiB on node 0");
        assert_eq!(fullest_node("7f00 default N1=1 N0=1 kernelpagesize_kB=4\n"), Some(0));
    }

    #[test]
    fn memory_of_some_mappings_is_summed_by_node() {
        let text = "1000 default anon=3 N1=3 kernelpagesize_kB=4\n\
                    200000 bind:0 huge anon=2 N0=2 kernelpagesize_kB=2048\n\
                    900000 default anon=7 N0=7 kernelpagesize_kB=4\nheap default N0=9 kernelpagesize_kB=4\n";
        let ranges = [(Hva::new(0x1000), Bytes::new(0x1000)), (Hva::new(0x20_0000), Bytes::new(0x40_0000))];
        assert_eq!(bytes_by_node(text, &ranges), [(0, Bytes::new(4 << 20)), (1, Bytes::new(3 << 12))]);
        assert_eq!(bytes_by_node(text, &[]), []);
    }

    #[test]
    fn a_text_without_nodes_names_none() {
        let other_policies = "7f00 default stack\n7f00 bind:1 N1=4\n7f00 default N1=many NaN=3 kernelpagesize_kB=4\n";
        assert_eq!((fullest_node(""), fullest_node(other_policies)), (None, None));
    }
}
