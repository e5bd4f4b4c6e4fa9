//! Do not trust the flag, read the counter: for each backing and guest page size, after promotion, hold and
//! recovery, KVM maps at the level that this host's paging should give. Needs KVM.

use std::sync::Arc;

use wideleaf_policies::{MappingStats, PageSize};
use wideleaf_run::front_end::{FrontEnd, Quiet};
use wideleaf_run::interrupts::Interrupts;
use wideleaf_run::mappings::{check_all, expected_level, fits};
use wideleaf_testing::{has_kvm, turn_at_the_giants};

#[test]
fn every_mapping_is_at_the_level_this_paging_should_give() {
    if !has_kvm() {
        return;
    }
    // Some rows take a page of 1 GiB, which another test would find missing.
    let _turn = turn_at_the_giants();
    let front: Arc<dyn FrontEnd> = Arc::new(Quiet);
    let report = check_all(&front, &Interrupts::install().unwrap()).unwrap();
    println!("{report:#?}");
    assert_eq!(report.wrong(), 0);
    let has = |state: &str, backing: &str| report.rows.iter().any(|row| row.state == state && row.backing == backing);
    for state in ["start", "collapsed", "held at 4k", "recovered"] {
        assert!(has(state, "anon") && has(state, "memfd"), "no row for {state}");
    }
}

#[test]
fn shadow_paging_maps_with_the_smaller_page_and_two_dimensions_with_the_hosts() {
    use PageSize::{Base4K, Giant1G, Huge2M};
    assert_eq!(expected_level("shadow", Base4K, Huge2M, false), Base4K);
    assert_eq!(expected_level("shadow", Giant1G, Giant1G, false), Huge2M);
    assert_eq!(expected_level("npt", Base4K, Huge2M, false), Huge2M);
    assert_eq!(expected_level("ept", Base4K, Giant1G, false), Giant1G);
    assert_eq!(expected_level("ept", Huge2M, Giant1G, true), Base4K);
}

#[test]
fn counters_of_another_level_do_not_fit() {
    // A pattern of 8 MiB, and 27 pages of the guest's program beside it.
    let all_4k = MappingStats { pages_4k: 2048 + 27, pages_2m: 0, pages_1g: 0 };
    let all_2m = MappingStats { pages_4k: 27, pages_2m: 4, pages_1g: 0 };
    let half = MappingStats { pages_4k: 1024 + 27, pages_2m: 2, pages_1g: 0 };
    let one_1g = MappingStats { pages_4k: 0, pages_2m: 0, pages_1g: 1 };
    assert!(fits(PageSize::Base4K, all_4k) && fits(PageSize::Huge2M, all_2m) && fits(PageSize::Giant1G, one_1g));
    for level in [PageSize::Huge2M, PageSize::Giant1G] {
        assert!(!fits(level, all_4k) && !fits(level, half), "{level}");
    }
    assert!(!fits(PageSize::Base4K, all_2m) && !fits(PageSize::Base4K, half) && !fits(PageSize::Giant1G, all_2m));
}
