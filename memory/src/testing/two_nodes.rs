//! Files of a host with two nodes, each with four CPUs and 16 GiB; node 1 has no free block of 2 MiB.

/// Files by path.
#[derive(Clone, Copy, Debug)]
pub struct HostFiles(&'static [(&'static str, &'static str)]);

impl HostFiles {
    /// Text of a file, if the host has it.
    pub fn text(&self, path: &str) -> Option<&'static str> {
        self.0.iter().find(|(known, _)| *known == path).map(|(_, text)| *text)
    }

    /// All files, as path and text.
    pub fn all(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        self.0.iter().copied()
    }
}

/// The host with two nodes.
pub const TWO_NODES: HostFiles = HostFiles(&[
    ("/sys/devices/system/node/online", "0-1\n"),
    ("/sys/devices/system/node/node0/cpulist", "0-1,4-5\n"),
    ("/sys/devices/system/node/node1/cpulist", "2-3,6-7\n"),
    ("/sys/devices/system/node/node0/distance", "10 21\n"),
    ("/sys/devices/system/node/node1/distance", "21 10\n"),
    (
        "/sys/devices/system/node/node0/meminfo",
        "Node 0 MemTotal:       16777216 kB\n\
         Node 0 MemFree:         8388608 kB\n\
         Node 0 PageTables:         4096 kB\n\
         Node 0 SecPageTables:      1024 kB\n",
    ),
    (
        "/sys/devices/system/node/node1/meminfo",
        "Node 1 MemTotal:       16777216 kB\n\
         Node 1 MemFree:         1048576 kB\n\
         Node 1 PageTables:         2048 kB\n\
         Node 1 SecPageTables:       512 kB\n",
    ),
    ("/sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages", "0\n"),
    ("/sys/devices/system/node/node0/hugepages/hugepages-2048kB/free_hugepages", "0\n"),
    ("/sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages", "64\n"),
    ("/sys/devices/system/node/node1/hugepages/hugepages-2048kB/free_hugepages", "0\n"),
    ("/sys/devices/system/node/node1/hugepages/hugepages-1048576kB/nr_hugepages", "2\n"),
    ("/sys/devices/system/node/node1/hugepages/hugepages-1048576kB/free_hugepages", "1\n"),
    (
        "/proc/buddyinfo",
        "Node 0, zone    DMA32      0      0      0      0      0      0      0      0      0     12    100 \n\
         Node 0, zone   Normal      9      9      9      9      9      9      9      9      9      0    150 \n\
         Node 1, zone   Normal   4000   3000   2000   1000    500    200    100     50     20      0      0 \n",
    ),
]);
