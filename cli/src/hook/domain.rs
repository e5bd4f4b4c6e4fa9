//! The request of a libvirt domain, from its XML: pages of the hugetlb pool, and what its metadata say.
//!
//! ```text
//!   <memory>, <numa><cell>, <devices><memory> ──▶ pieces of RAM, by guest NUMA node
//!   <memoryBacking><hugepages><page nodeset>  ──▶ page size of each       ├─▶ PoolRequest { page_bytes, pages, node }
//!   <numatune>, <nodemask>                    ──▶ host nodes of each
//!   <metadata><wideleaf:memory …/>            ──▶ MemoryMetadata
//!   <metadata><nova:instance …/>              ──▶ flavor
//! ```
//!
//! Elements and units: libvirt's "Domain XML format" (formatdomain). `<currentMemory>` is the part that the balloon
//! leaves to the guest. QEMU takes all of `<memory>` from the pool when it starts, but only the touched part of
//! ordinary memory.

use std::collections::{BTreeMap, BTreeSet};

use wideleaf_control::protocol::{OrdinaryMemory, PoolRequest};

use super::metadata::MemoryMetadata;
use super::nova;
use super::xml::{Element, XmlError};

/// Page sizes of hugetlb pools on x86-64. A domain may also request 4 KiB pages, which come from no pool.
const POOL_PAGES: [u64; 2] = [2 << 20, 1 << 30];
/// More nodes than any host: Linux is built for at most 1024 (CONFIG_NODES_SHIFT).
const NODES_MAX: u32 = 1024;

/// The request of a domain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Domain {
    /// UUID of the domain, as libvirt writes it.
    pub uuid: String,
    /// Pages that it takes from pools when it starts, by size and host node.
    pub pages: Vec<PoolRequest>,
    /// Upper limit of its memory on ordinary pages, in bytes.
    pub ordinary_bytes: u64,
    /// Settings in its metadata.
    pub metadata: MemoryMetadata,
    /// OpenStack Nova's flavor of the instance; `None` for other domains.
    pub flavor: Option<String>,
}

impl Domain {
    /// Reads a domain's XML. `default_page`: the host's size for `<hugepages/>` without a size.
    ///
    /// # Errors
    /// [`XmlError`] if it is not valid XML. Unknown parts of it are ignored.
    pub fn parse(text: &str, default_page: u64) -> Result<Domain, XmlError> {
        let root = Element::parse(text)?;
        let uuid = root.child("uuid").map(|uuid| uuid.text.clone()).unwrap_or_default();
        let (pages, ordinary_bytes) = memory(&root, default_page);
        Ok(Domain { uuid, pages, ordinary_bytes, metadata: MemoryMetadata::of(&root), flavor: nova::flavor(&root) })
    }

    /// The amount of ordinary memory that its guarantee needs in large pages, also where that does not prevent a start:
    /// the share of all memory, minus what the pools give. `None` if that is zero.
    pub fn guaranteed(&self) -> Option<OrdinaryMemory> {
        let share = self.metadata.guarantee().share()?;
        let pooled =
            self.pages.iter().fold(0, |sum: u64, of| sum.saturating_add(of.pages.saturating_mul(of.page_bytes)));
        let all = u128::from(pooled) + u128::from(self.ordinary_bytes);
        let large = (all * u128::from(share) / 10_000).saturating_sub(u128::from(pooled));
        // The share is at most 100 %, so the rest is at most all of the ordinary memory.
        let large_bytes = u64::try_from(large).unwrap_or(self.ordinary_bytes);
        (large_bytes > 0).then_some(OrdinaryMemory { bytes: self.ordinary_bytes, large_bytes })
    }
}

/// A piece of guest RAM that is mapped as one.
struct Piece {
    bytes: u64,
    /// NUMA node of the guest.
    node: u32,
    /// Page size, if the piece itself names one.
    page_bytes: Option<u64>,
    /// Nodes of the host that bind it, ascending; none: any.
    host_nodes: Vec<u32>,
}

/// Pages of the pools, and bytes of ordinary memory.
fn memory(domain: &Element, default_page: u64) -> (Vec<PoolRequest>, u64) {
    let rules = PageRules::of(domain, default_page);
    let mut pages = BTreeMap::<(u64, Vec<u32>), u64>::new();
    let mut ordinary = 0_u64;
    for piece in initial_memory(domain).into_iter().chain(devices(domain)) {
        let size = piece.page_bytes.or_else(|| rules.page_of(piece.node));
        let Some(size) = size.filter(|size| POOL_PAGES.contains(size)) else {
            ordinary = ordinary.saturating_add(piece.bytes);
            continue;
        };
        let sum = pages.entry((size, piece.host_nodes)).or_default();
        *sum = sum.saturating_add(piece.bytes.div_ceil(size));
    }
    let request = |((page_bytes, nodes), pages): ((u64, Vec<u32>), u64)| match nodes[..] {
        [node] => PoolRequest { page_bytes, pages, node: Some(node), nodes: Vec::new() },
        _ => PoolRequest { page_bytes, pages, node: None, nodes },
    };
    let pages = pages.into_iter().map(request);
    let left_by_balloon = domain.child("currentMemory").and_then(size).unwrap_or(u64::MAX);
    (pages.collect(), ordinary.min(left_by_balloon))
}

/// Rules of `<hugepages>`: a page size for some guest nodes, and one for all others.
#[derive(Default)]
struct PageRules {
    of_nodes: Vec<(BTreeSet<u32>, u64)>,
    others: Option<u64>,
}

impl PageRules {
    fn of(domain: &Element, default_page: u64) -> PageRules {
        let Some(hugepages) = domain.child("memoryBacking").and_then(|backing| backing.child("hugepages")) else {
            return PageRules::default();
        };
        let mut rules = PageRules::default();
        for page in hugepages.all("page") {
            let Some(size) = page.attribute("size").and_then(|size| scaled(size, page.attribute("unit"))) else {
                continue;
            };
            match page.attribute("nodeset") {
                Some(nodes) => rules.of_nodes.push((node_set(nodes), size)),
                None => rules.others = Some(size),
            }
        }
        if hugepages.child("page").is_none() {
            rules.others = Some(default_page);
        }
        rules
    }

    fn page_of(&self, node: u32) -> Option<u64> {
        let rule = self.of_nodes.iter().find(|(nodes, _)| nodes.contains(&node));
        rule.map(|(_, size)| *size).or(self.others)
    }
}

/// RAM without devices: the cells of a guest with NUMA, otherwise one piece. `<memory>` is the sum of it and all
/// devices.
fn initial_memory(domain: &Element) -> Vec<Piece> {
    let placement = Placement::of(domain);
    let cells = domain.child("cpu").and_then(|cpu| cpu.child("numa"));
    let cells: Vec<&Element> = cells.map(|numa| numa.all("cell").collect()).unwrap_or_default();
    if cells.is_empty() {
        let total = domain.child("memory").and_then(size).unwrap_or(0);
        let in_devices = device_elements(domain).filter_map(|(_, target)| size(target.child("size")?));
        let bytes = total.saturating_sub(in_devices.fold(0, u64::saturating_add));
        return vec![Piece { bytes, node: 0, page_bytes: None, host_nodes: placement.host_nodes(0) }];
    }
    let piece = |(index, cell): (u32, &Element)| {
        let node = cell.attribute("id").and_then(|id| id.parse().ok()).unwrap_or(index);
        let bytes = cell.attribute("memory").and_then(|memory| scaled(memory, cell.attribute("unit")))?;
        Some(Piece { bytes, node, page_bytes: None, host_nodes: placement.host_nodes(node) })
    };
    (0..NODES_MAX).zip(cells).filter_map(piece).collect()
}

fn device_elements(domain: &Element) -> impl Iterator<Item = (&Element, &Element)> {
    let devices = domain.child("devices").into_iter().flat_map(|devices| devices.all("memory"));
    devices.filter_map(|device| Some((device, device.child("target")?)))
}

/// Memory devices that take host memory: a DIMM takes its size, `virtio-mem` its requested size. The others are files.
fn devices(domain: &Element) -> Vec<Piece> {
    let piece = |(device, target): (&Element, &Element)| {
        let bytes = match device.attribute("model")? {
            "dimm" => size(target.child("size")?)?,
            "virtio-mem" => size(target.child("requested")?)?,
            _ => return None,
        };
        let source = device.child("source");
        let page_bytes = source.and_then(|source| size(source.child("pagesize")?));
        let mask = source.and_then(|source| source.child("nodemask")).map(|mask| node_set(&mask.text));
        let node = target.child("node").and_then(|node| node.text.parse().ok()).unwrap_or(0);
        let host_nodes = match mask {
            Some(nodes) => nodes.into_iter().collect(),
            None => Placement::of(domain).host_nodes(node),
        };
        Some(Piece { bytes, node, page_bytes, host_nodes })
    };
    device_elements(domain).filter_map(piece).collect()
}

/// Host nodes of `<numatune>`, if it binds. With a mode that only prefers, or takes turns, a page may come from any
/// node.
struct Placement {
    of_cells: BTreeMap<u32, Vec<u32>>,
    others: Vec<u32>,
}

impl Placement {
    fn of(domain: &Element) -> Placement {
        let tune = domain.child("numatune");
        let others = tune.and_then(|tune| tune.child("memory")).map(strict_nodes).unwrap_or_default();
        let cells = tune.into_iter().flat_map(|tune| tune.all("memnode"));
        let of_cell = |cell: &Element| Some((cell.attribute("cellid")?.parse().ok()?, strict_nodes(cell)));
        Placement { of_cells: cells.filter_map(of_cell).collect(), others }
    }

    fn host_nodes(&self, cell: u32) -> Vec<u32> {
        self.of_cells.get(&cell).unwrap_or(&self.others).clone()
    }
}

/// Nodes that bind; none where the mode does not.
fn strict_nodes(tune: &Element) -> Vec<u32> {
    // libvirt's default is strict; restrictive also binds, through the control group.
    let binds = matches!(tune.attribute("mode"), None | Some("strict" | "restrictive"));
    let nodes = tune.attribute("nodeset").filter(|_| binds).map(node_set).unwrap_or_default();
    nodes.into_iter().collect()
}

/// Nodes of a list like `0-3,^2,5`; invalid parts are ignored.
fn node_set(text: &str) -> BTreeSet<u32> {
    let mut nodes = BTreeSet::new();
    for part in text.split(',').map(str::trim) {
        let number = |text: &str| text.parse::<u32>().ok().filter(|node| *node < NODES_MAX);
        if let Some(node) = part.strip_prefix('^').and_then(number) {
            nodes.remove(&node);
        } else if let Some((first, last)) = part.split_once('-').and_then(|(a, b)| Some((number(a)?, number(b)?))) {
            nodes.extend(first..=last);
        } else {
            nodes.extend(number(part));
        }
    }
    nodes
}

/// `<memory unit='KiB'>1024</memory>` in bytes.
fn size(element: &Element) -> Option<u64> {
    scaled(&element.text, element.attribute("unit"))
}

/// A number in one of libvirt's units, by default KiB: `k` and `KiB` are 1024 bytes, `KB` is 1000.
fn scaled(number: &str, unit: Option<&str>) -> Option<u64> {
    let unit = unit.unwrap_or("KiB").to_ascii_lowercase();
    let (prefix, rest) = unit.split_at_checked(1)?;
    let factor = match ("kmgtpe".find(prefix), rest) {
        (Some(at), "" | "ib") => 1024u64.checked_pow(at as u32 + 1)?,
        (Some(at), "b") => 1000u64.checked_pow(at as u32 + 1)?,
        (None, _) if matches!(unit.as_str(), "b" | "byte" | "bytes") => 1,
        _ => return None,
    };
    number.trim().parse::<u64>().ok()?.checked_mul(factor)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HUGE: u64 = 2 << 20;
    const GIANT: u64 = 1 << 30;

    fn wanted(inside: &str) -> Vec<(u64, u64, Option<u32>)> {
        let text = format!("<domain type='kvm'><name>vm</name><uuid>1-2</uuid>{inside}</domain>");
        let domain = Domain::parse(&text, HUGE).expect("a domain");
        assert_eq!(domain.uuid, "1-2");
        domain.pages.iter().map(|want| (want.page_bytes, want.pages, want.node)).collect()
    }

    fn wanted_on_nodes(inside: &str) -> Vec<(u64, u64, Vec<u32>)> {
        let text = format!("<domain type='kvm'><name>vm</name><uuid>1-2</uuid>{inside}</domain>");
        let domain = Domain::parse(&text, HUGE).expect("a domain");
        let nodes = |want: &PoolRequest| want.on_nodes().unwrap_or_default().to_vec();
        domain.pages.iter().map(|want| (want.page_bytes, want.pages, nodes(want))).collect()
    }

    #[test]
    fn a_domain_without_hugepages_wants_nothing_of_a_pool() {
        assert_eq!(wanted("<memory unit='KiB'>262144</memory>"), []);
        let base = "<memoryBacking><hugepages><page size='4'/></hugepages></memoryBacking>";
        assert_eq!(wanted(&format!("<memory>262144</memory>{base}")), [], "no pool has 4 KiB pages");
    }

    #[test]
    fn all_of_memory_is_requested_whatever_the_balloon_leaves() {
        let memory = "<memory unit='MiB'>257</memory><currentMemory unit='MiB'>64</currentMemory>";
        let backing = "<memoryBacking><hugepages/></memoryBacking>";
        // 257 MiB end in the middle of a page, which is taken whole.
        assert_eq!(wanted(&format!("{memory}{backing}")), [(HUGE, 129, None)]);
    }

    #[test]
    fn each_cell_has_its_page_size_and_host_node() {
        let inside = "<memory unit='GiB'>4</memory>
            <memoryBacking><hugepages>
              <page size='1' unit='G' nodeset='1-3,^2'/><page size='2048' unit='KiB'/>
            </hugepages></memoryBacking>
            <numatune><memory mode='strict' nodeset='0-1'/>
              <memnode cellid='1' mode='strict' nodeset='1'/>
              <memnode cellid='2' mode='preferred' nodeset='1'/></numatune>
            <cpu><numa>
              <cell id='0' cpus='0' memory='1048576' unit='KiB'/>
              <cell id='1' cpus='1' memory='1' unit='GiB'/>
              <cell id='2' memory='1048576'/>
              <cell id='3' memory='1048576'/>
            </numa></cpu>";
        assert_eq!(
            wanted_on_nodes(inside),
            [(HUGE, 512, vec![]), (HUGE, 512, vec![0, 1]), (GIANT, 1, vec![0, 1]), (GIANT, 1, vec![1]),]
        );
    }

    #[test]
    fn cells_without_a_rule_are_on_base_pages() {
        let inside = "<memoryBacking><hugepages><page size='2' unit='M' nodeset='1'/></hugepages></memoryBacking>
            <cpu><numa><cell id='0' memory='4096'/><cell id='1' memory='8192'/></numa></cpu>";
        assert_eq!(wanted(inside), [(HUGE, 4, None)]);
    }

    #[test]
    fn devices_take_their_own_pages_and_are_not_initial_memory() {
        let inside = "<memory unit='MiB'>1408</memory><memoryBacking><hugepages/></memoryBacking>
            <numatune><memory mode='strict' nodeset='0'/></numatune>
            <devices>
              <memory model='dimm'><target><size unit='MiB'>128</size><node>0</node></target></memory>
              <memory model='dimm'><source><pagesize unit='GiB'>1</pagesize><nodemask>1</nodemask></source>
                <target><size unit='GiB'>1</size></target></memory>
              <memory model='nvdimm'><source><path>/x</path></source>
                <target><size unit='MiB'>64</size></target></memory>
              <memory model='virtio-mem'>
                <target><size unit='MiB'>64</size><requested unit='MiB'>10</requested></target></memory>
            </devices>";
        // Initial: 1408 - 128 - 1024 - 64 - 64 = 128 MiB; with the DIMM and the requested part of virtio-mem's 64,
        // 133 pages.
        assert_eq!(wanted(inside), [(HUGE, 133, Some(0)), (GIANT, 1, Some(1))]);
    }

    #[test]
    fn a_guarantee_covers_ordinary_memory_beyond_that_of_the_pools() {
        let guaranteed = |inside: &str| {
            let metadata = "<metadata><memory xmlns='urn:wideleaf:memory:1' guarantee='90%'/></metadata>";
            let domain = Domain::parse(&format!("<domain>{metadata}{inside}</domain>"), HUGE).expect("a domain");
            domain.guaranteed().map(|memory| (memory.bytes >> 20, memory.large_bytes >> 20))
        };
        assert_eq!(guaranteed("<memory unit='MiB'>1000</memory>"), Some((1000, 900)));
        let balloon = "<memory unit='MiB'>1000</memory><currentMemory unit='MiB'>100</currentMemory>";
        assert_eq!(guaranteed(balloon), Some((100, 90)), "the guest has no more");
        let pool = "<memory unit='MiB'>1000</memory><memoryBacking><hugepages/></memoryBacking>";
        assert_eq!(guaranteed(pool), None);
        let cells = "<memoryBacking><hugepages><page size='2' unit='M' nodeset='1'/></hugepages></memoryBacking>
            <cpu><numa><cell id='0' memory='100' unit='MiB'/><cell id='1' memory='100' unit='MiB'/></numa></cpu>";
        // 90 % of 200 MiB are 180, of which the pool gives 100.
        assert_eq!(guaranteed(cells), Some((100, 80)));
        let nothing = Domain::parse("<domain><memory>1000</memory></domain>", HUGE).expect("a domain");
        assert_eq!((nothing.guaranteed(), nothing.ordinary_bytes), (None, 1_024_000));
    }

    #[test]
    fn units_are_libvirts() {
        for (unit, bytes) in [
            (None, 7 << 10),
            (Some("b"), 7),
            (Some("bytes"), 7),
            (Some("KB"), 7_000),
            (Some("k"), 7 << 10),
            (Some("MiB"), 7 << 20),
            (Some("GB"), 7_000_000_000),
            (Some("T"), 7 << 40),
        ] {
            assert_eq!(scaled("7", unit), Some(bytes), "{unit:?}");
        }
        for unit in ["", "x", "KiBB", "é", "kk"] {
            assert_eq!(scaled("7", Some(unit)), None, "{unit}");
        }
        assert_eq!((scaled("-7", None), scaled("99999999999", Some("EiB"))), (None, None));
    }

    #[test]
    fn a_node_set_is_bounded() {
        assert_eq!(node_set("0-3,^2,5").into_iter().collect::<Vec<_>>(), [0, 1, 3, 5]);
        assert!(node_set("0-4294967295,-,^,7-3,x").is_empty());
    }

    /// A complete live XML, as libvirt passes it to a hook, with all elements that are read here.
    const LIVE: &str = include_str!("../../tests/domains/live.xml");

    #[test]
    fn a_live_domain_is_read() {
        let domain = Domain::parse(LIVE, HUGE).expect("a domain");
        assert_eq!(domain.uuid, "8d2f4c5e-0f4b-4c3a-9d38-1f0f5a7c2b11");
        assert_eq!(domain.pages, [PoolRequest { page_bytes: HUGE, pages: 64, node: None, nodes: Vec::new() }]);
        assert_eq!(domain.metadata.settings.guarantee.as_deref(), Some("95%"));
    }

    proptest! {
        #[test]
        fn a_damaged_domain_never_panics(
            cuts in prop::collection::vec((0..LIVE.len(), 0usize..40, "\\PC{0,12}"), 1..8)
        ) {
            let mut bytes = LIVE.as_bytes().to_vec();
            for (at, length, new) in cuts {
                let at = at.min(bytes.len());
                let end = (at + length).min(bytes.len());
                bytes.splice(at..end, new.into_bytes());
            }
            let _ = Domain::parse(&String::from_utf8_lossy(&bytes), HUGE);
        }

        #[test]
        fn no_numbers_overflow(numbers in prop::collection::vec(any::<u64>(), 6), unit in "[bkmgtpe]") {
            let [a, b, c, d, e, f] = numbers[..] else { unreachable!("six") };
            let text = format!(
                "<domain><memory unit='{unit}'>{a}</memory>
                 <memoryBacking><hugepages><page size='{b}' unit='{unit}'/>
                   <page size='2' unit='M' nodeset='{c}'/></hugepages></memoryBacking>
                 <cpu><numa><cell id='{c}' memory='{d}' unit='{unit}'/><cell memory='{d}'/></numa></cpu>
                 <devices>
                 <memory model='dimm'><source><pagesize>2048</pagesize></source>
                   <target><size>{e}</size></target></memory>
                 <memory model='dimm'><source><pagesize>2048</pagesize></source>
                   <target><size>{f}</size></target></memory>
                 </devices></domain>"
            );
            let domain = Domain::parse(&text, HUGE).expect("a domain");
            prop_assert!(domain.pages.len() <= 4);
            prop_assert!(domain.guaranteed().is_none());
        }
    }
}
