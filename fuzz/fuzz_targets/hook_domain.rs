//! Input: a domain's XML as libvirt passes it to its hook, with its metadata. A parsed domain asks each hugetlb pool
//! once, and only pools that x86-64 has; whatever its metadata say, its guarantee can be computed. Nothing is touched.
#![no_main]
#![allow(dead_code, reason = "the hook uses more of these files than this target")]

use libfuzzer_sys::fuzz_target;

// The hook's own files are included, because their crate embeds the guest image, which cannot be built with
// instrumentation.
#[path = "../../cli/src/hook/domain.rs"]
mod domain;
#[path = "../../cli/src/hook/metadata.rs"]
mod metadata;
#[path = "../../cli/src/hook/nova.rs"]
mod nova;
#[path = "../../cli/src/hook/xml.rs"]
mod xml;

const POOL_PAGES: [u64; 2] = [2 << 20, 1 << 30];

fuzz_target!(|text: &str| {
    let Ok(domain) = domain::Domain::parse(text, POOL_PAGES[0]) else { return };
    let _ = domain.metadata.guarantee();
    assert!(domain.pages.iter().all(|wanted| POOL_PAGES.contains(&wanted.page_bytes)), "{:?}", domain.pages);
    let places: Vec<_> = domain.pages.iter().map(|wanted| (wanted.page_bytes, wanted.node)).collect();
    assert!(places.is_sorted_by(|one, next| one < next), "each pool is asked once: {places:?}");
});
