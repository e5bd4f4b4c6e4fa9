//! Pages of 1 GiB that are made when they are wanted, on the kernel that this runs on: by the one of two ways that it
//! has. The pool is as before afterwards. Needs root and a gibibyte that the kernel can empty.

use wideleaf_memory::giant_maker::make_in;
use wideleaf_memory::kernel::GiantMappings as _;
use wideleaf_memory::pool::{HugetlbPools, NewPages, NotMade, PoolStatus};
use wideleaf_memory::side_mapping::GiantFile;
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam, Host as _, LinuxHost, host::Advice};
use wideleaf_policies::units::gib;
use wideleaf_policies::{Gpa, GpaRange, PageSize};

use crate::turn_at_the_pools;

const SIZE: PageSize = PageSize::Giant1G;

fn skipped(why: &dyn std::fmt::Display) {
    let required = std::env::var("WIDELEAF_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|word| word == "hugetlb1g"), "WIDELEAF_REQUIRE={required}, and {why}");
    println!("skipped: {why}");
}

/// A page made by this kernel, with the pools and their state before; `None` if the test is to be skipped.
fn made() -> Option<(HugetlbPools, PoolStatus, GiantFile)> {
    let pools = HugetlbPools::of_this_machine();
    let before = match pools.status(SIZE) {
        Ok(before) if before.available() == 0 => before,
        Ok(_) => {
            println!("skipped: the pool has a free page of 1 GiB; `wideleaf pool release --size 1g --all-unused`");
            return None;
        }
        Err(error) => {
            skipped(&error);
            return None;
        }
    };
    let file = GiantFile::of_pool().unwrap();
    match make_in(&pools, &file, None) {
        Ok(()) => Some((pools, before, file)),
        Err(error) => {
            assert_eq!(pools.status(SIZE).unwrap(), before, "{error}");
            skipped(&error);
            None
        }
    }
}

/// Something else took memory of the gibibyte that was free just now.
fn no_longer_free(pools: &HugetlbPools, before: PoolStatus, error: &NotMade) {
    assert_eq!((error.reason(), pools.status(SIZE).unwrap()), ("no_room", before), "{error}");
    skipped(error);
}

#[test]
fn a_page_is_made_beside_the_pool_and_goes_back_with_its_file() {
    let _turn = turn_at_the_pools();
    let Some((pools, before, file)) = made() else { return };
    println!("made by {:?}", pools.made_by(SIZE).unwrap());
    let with = pools.status(SIZE).unwrap();
    // It counts as surplus: the kernel takes it back when it is unmapped.
    assert_eq!((with.total, with.surplus, with.free), (before.total + 1, before.surplus + 1, before.free), "{with:?}");
    assert_eq!((with.overcommit, with.persistent()), (before.overcommit, before.persistent()));
    // The page is there: the file takes no other one.
    LinuxHost::open().unwrap().fill_giant(&file, None).unwrap();
    assert_eq!(pools.status(SIZE).unwrap(), with);
    drop(file);
    assert_eq!(pools.status(SIZE).unwrap(), before);
    assert!(!pools.has_unfinished(SIZE));
}

#[test]
fn guest_ram_takes_pages_that_are_made_for_it_whether_it_touches_them_or_not() {
    let _turn = turn_at_the_pools();
    let Some((pools, before, file)) = made() else { return };
    drop(file);
    let host = LinuxHost::open().unwrap();
    let range = GpaRange::new(Gpa::new(0), gib(1)).unwrap();
    let backing = BackingConfig::new(BackingKind::Hugetlb, SIZE).unwrap();
    for is_touched in [false, true] {
        let new = NewPages { size: SIZE, pages: 1, node: None };
        assert!(pools.check(SIZE, gib(1)).is_err(), "the pool has none");
        let ram = match pools.with_new_pages(&new, || GuestRam::map(&[range], backing)) {
            Ok(ram) => ram,
            Err(error) => return no_longer_free(&pools, before, &error),
        };
        let with = pools.status(SIZE).unwrap();
        assert_eq!((with.overcommit, with.persistent()), (before.overcommit, before.persistent()), "{with:?}");
        assert_eq!(with.surplus, before.surplus + 1, "{with:?}");
        if is_touched {
            host.advise(ram.base(), gib(1), Advice::PopulateWrite).unwrap();
        }
        drop(ram);
        assert_eq!(pools.status(SIZE).unwrap(), before, "touched: {is_touched}");
    }
}

#[test]
fn a_mapping_that_fails_leaves_no_page() {
    let _turn = turn_at_the_pools();
    let Some((pools, before, file)) = made() else { return };
    drop(file);
    let new = NewPages { size: SIZE, pages: 1, node: None };
    let error = pools.with_new_pages(&new, || Err::<(), _>("no")).unwrap_err();
    if error.reason() != "not_mapped" {
        return no_longer_free(&pools, before, &error);
    }
    assert!(error.to_string().starts_with("cannot map a new page: no; "), "{error}");
    assert_eq!(pools.status(SIZE).unwrap(), before);
}

#[test]
fn more_pages_than_the_host_has_memory_are_refused_and_nothing_is_tried() {
    let _turn = turn_at_the_pools();
    let pools = HugetlbPools::of_this_machine();
    let Ok(before) = pools.status(SIZE) else { return };
    let new = NewPages { size: SIZE, pages: 1 << 20, node: None };
    let error = pools.with_new_pages(&new, || Err::<(), _>("a petabyte was made")).unwrap_err();
    assert!(!matches!(error, NotMade::NotMapped(_)), "{error}");
    assert_eq!(pools.status(SIZE).unwrap(), before);
}

/// The probe answers the same twice, and leaves the limit as it was. `WIDELEAF_GIANTS_MADE_BY` has the way of a kernel
/// that is known: `Surplus` or `Growth`.
#[test]
fn the_kernels_way_is_found_without_a_change() {
    let _turn = turn_at_the_pools();
    let pools = HugetlbPools::of_this_machine();
    let Ok(before) = pools.status(SIZE) else { return };
    let ways = [pools.made_by(SIZE), pools.made_by(SIZE)];
    if let [Ok(first), Ok(second)] = &ways {
        assert_eq!(first, second);
        if let Ok(known) = std::env::var("WIDELEAF_GIANTS_MADE_BY") {
            assert_eq!(format!("{first:?}"), known);
        }
    } else {
        println!("skipped: {ways:?}");
    }
    assert_eq!(pools.status(SIZE).unwrap(), before);
}
