//! The NUMA node with most of a process's memory, from `/proc/PID/numa_maps` (numa_maps(7)): a giant page is made where
//! the memory lies that will move onto it.
//!
//! ```text
//!   7f0000000000 default anon=300 dirty=300 N0=100 N1=200 kernelpagesize_kB=4
//!                                           pages by node, of that size
//! ```

/// The node with most memory; of equal ones the first. `None` if the text names none.
pub fn fullest_node(numa_maps: &str) -> Option<u32> {
    let mut kibibytes: Vec<(u32, u64)> = Vec::new();
    for line in numa_maps.lines() {
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
    kibibytes.into_iter().max_by_key(|(node, sum)| (*sum, std::cmp::Reverse(*node))).map(|(node, _)| node)
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
    fn a_text_without_nodes_names_none() {
        let of_others = "7f00 default stack\n7f00 bind:1 N1=4\n7f00 default N1=many NaN=3 kernelpagesize_kB=4\n";
        assert_eq!((fullest_node(""), fullest_node(of_others)), (None, None));
    }
}
