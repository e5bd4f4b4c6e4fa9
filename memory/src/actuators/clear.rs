//! Clear: all of a guest's RAM reads zero again, as when it was mapped, for a machine that was reset and boots again.
//!
//! ```text
//!   anonymous, memfd ── released ──▶ MADV_DONTNEED, a hole in the file; advice as at the start ──▶ zero at next touch
//!   the pool's pages, giants, prefaulted RAM ── kept ──▶ written over with zeroes
//! ```
//!
//! Pages that can be allocated again are released. That costs nothing for memory that the next boot does not use, the
//! host gets the memory back, and the manager finds RAM as before the first boot. Other pages are kept. A page that
//! goes back to the hugetlb pool may go to another process, and a guest that touches its place later would be killed
//! by `SIGBUS`. Prefaulted RAM must not fault.
//!
//! Pinned pages: devices of this process finish their transfers before their machine's RAM is cleared, so they
//! have no pins. A transfer of another process into a released page ends in a page that the next guest does not
//! have, as it must.

use std::io;
use std::sync::atomic::Ordering;

use wideleaf_policies::{GpaRange, PageSize};

use crate::backing::BackingKind;
use crate::host::{Host, HostError};
use crate::region::{GuestRam, RamRange};
use crate::side_mapping::GIANT;

/// Treatment of the pages that RAM has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// They go back to the host; RAM can get others later.
    Released,
    /// All RAM has pages and must keep them.
    Kept,
}

/// Clears all RAM of a guest. No vCPU runs, no device is at work, and the manager rests
/// ([`crate::Manager::ask_to_rest`]). Afterwards no memory counts as given back: the balloon is empty, and reported
/// pages are in use.
///
/// Refused while pages of a window are still aside because the kernel could not bring them back. They belong to the
/// previous guest and would come back later, into the RAM of the next one.
///
/// # Errors
/// [`HostError`]; a part of RAM is then unchanged.
pub fn clear(host: &dyn Host, ram: &GuestRam, pages: Pages) -> Result<(), HostError> {
    let _alone = ram.given_back().discarding();
    if ram.claims().parts_in_work() > 0 {
        let source = io::Error::from_raw_os_error(libc::EBUSY);
        return Err(HostError {
            what: "clear guest RAM: some of its pages are aside and cannot be brought back yet",
            source,
        });
    }
    if ram.claims().is_filling() {
        let source = io::Error::from_raw_os_error(libc::EBUSY);
        return Err(HostError {
            what: "clear guest RAM: a restore still fills it, and the saved contents would come back; abandon it first",
            source,
        });
    }
    ram.given_back().book().forget_all();
    let giants: Vec<_> = ram.claims().giants_in_use().iter().filter_map(|of| GpaRange::new(of.start, GIANT)).collect();
    for range in ram.ranges() {
        for stretch in without(*range, &giants) {
            match (ram.backing().kind(), pages) {
                (BackingKind::Hugetlb, _) | (_, Pages::Kept) => write_zeroes(ram, stretch.gpa),
                (BackingKind::Anon | BackingKind::Memfd, Pages::Released) => release(host, ram, stretch)?,
            }
        }
    }
    giants.iter().for_each(|giant| write_zeroes(ram, *giant));
    Ok(())
}

fn release(host: &dyn Host, ram: &GuestRam, stretch: RamRange) -> Result<(), HostError> {
    let (what, done) = match ram.backing().kind() {
        BackingKind::Anon => ("madvise(MADV_DONTNEED)", ram.discard_pages(stretch.gpa)),
        BackingKind::Memfd | BackingKind::Hugetlb => ("fallocate(FALLOC_FL_PUNCH_HOLE)", ram.punch(stretch.gpa)),
    };
    done.map_err(|source| HostError { what, source })?;
    // Windows were marked one by one since the start.
    ram.mark_for_start(host, stretch.gpa)
}

fn write_zeroes(ram: &GuestRam, gpa: GpaRange) {
    ram.words_of(gpa).iter().for_each(|word| word.store(0, Ordering::Relaxed));
}

/// The parts of a range before, between and after the giants, which ascend.
fn without(range: RamRange, giants: &[GpaRange]) -> Vec<RamRange> {
    let (mut stretches, mut from) = (Vec::new(), range.gpa.start());
    let ends = giants.iter().map(|giant| (giant.start(), giant.end()));
    for (end, next) in ends.filter(|(start, _)| range.gpa.contains(*start)).chain([(range.gpa.end(), range.gpa.end())])
    {
        stretches
            .extend((from < end).then(|| GpaRange::new(from, end - from)).flatten().and_then(|gpa| range.part(gpa)));
        from = next;
    }
    debug_assert!(stretches.iter().all(|stretch| stretch.gpa.start().is_aligned_to(PageSize::Huge2M)));
    stretches
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BackingConfig;
    use crate::host::linux::LinuxHost;
    use crate::sensors::host_backing::HostBackingSensor;
    use std::sync::Arc;
    use wideleaf_policies::units::{gib, mib};
    use wideleaf_policies::{Gpa, Hva};

    const HOLE: u64 = 4 << 20;

    /// Two ranges with a hole in between, and a word in each base page of both.
    fn written_ram(backing: BackingConfig) -> Arc<GuestRam> {
        let range = |start| GpaRange::new(Gpa::new(start), mib(4)).expect("fits");
        let ram = GuestRam::map(&[range(0), range((4 << 20) + HOLE)], backing).expect("eight mebibytes");
        ram.share().expect("no owner has its words");
        for range in ram.ranges() {
            ram.words(*range).iter().step_by(512).for_each(|word| word.store(7, Ordering::Relaxed));
        }
        ram
    }

    fn resident(host: &LinuxHost, ram: &GuestRam) -> u64 {
        let pages = |range: &RamRange| -> u64 {
            let mut sensor = HostBackingSensor::default();
            let rows = sensor
                .sample(host, *range, ram.backing().fixed_page())
                .expect("this process's own pages can be scanned");
            rows.map(|row| u64::from(row.resident)).sum()
        };
        ram.ranges().iter().map(pages).sum()
    }

    fn is_zero(ram: &GuestRam) -> bool {
        ram.ranges().iter().all(|range| ram.words(*range).iter().all(|word| word.load(Ordering::Relaxed) == 0))
    }

    fn backings() -> [BackingConfig; 2] {
        [BackingKind::Anon, BackingKind::Memfd].map(|kind| BackingConfig::new(kind, PageSize::Base4K).expect("exists"))
    }

    #[test]
    fn released_ram_has_no_page_and_reads_zero() {
        let host = LinuxHost::open().expect("this kernel has all that is needed");
        for backing in backings() {
            let ram = written_ram(backing);
            ram.given_back().book().inflate(Gpa::new(0x1000));
            clear(&host, &ram, Pages::Released).expect("it can be released");
            assert_eq!(resident(&host, &ram), 0, "{backing:?}");
            assert!(is_zero(&ram), "{backing:?}");
            assert!(ram.given_back().book().is_empty());
            assert_eq!(ram.given_back().counters().inflated_now, 0);
        }
    }

    #[test]
    fn ram_is_not_cleared_while_a_window_is_aside() {
        use crate::detached::Aside;
        use crate::mover::ALL_PAGES;
        use crate::testing::fake_host::FakeHost;
        use crate::testing::fake_mover::FakeMover;
        use wideleaf_policies::WindowIndex;

        let host = LinuxHost::open().expect("this kernel has all that is needed");
        let (ram, mover) = (written_ram(backings()[0]), Arc::new(FakeMover::default()));
        let window = WindowIndex::new(0);
        mover.write(window, ALL_PAGES);
        let aside = Aside::new(Arc::new(FakeHost::default()), mover.clone(), ram.claims().clone());
        aside.set_aside(window).expect("nothing fails yet");
        mover.fail_all(Some(libc::ENOMEM));
        aside.bring_back(window).expect_err("it is stuck");
        for pages in [Pages::Released, Pages::Kept] {
            let refused = clear(&host, &ram, pages).expect_err("pages of the previous guest would come back");
            assert_eq!(refused.source.raw_os_error(), Some(libc::EBUSY));
            assert_eq!(ram.words(ram.ranges()[0])[0].load(Ordering::Relaxed), 7, "nothing is cleared");
        }
        mover.fail_all(None);
        aside.serve().expect("nothing fails any more");
        clear(&host, &ram, Pages::Released).expect("it is back");
        assert!(is_zero(&ram));
    }

    #[test]
    fn kept_ram_has_all_its_pages_and_reads_zero() {
        let host = LinuxHost::open().expect("this kernel has all that is needed");
        for backing in backings() {
            let ram = written_ram(backing);
            clear(&host, &ram, Pages::Kept).expect("there is nothing to fail");
            // 8 MiB.
            assert_eq!(resident(&host, &ram), 2048, "{backing:?}");
            assert!(is_zero(&ram), "{backing:?}");
        }
    }

    #[test]
    fn a_promoted_window_starts_on_base_pages_again() {
        let host = LinuxHost::open().expect("this kernel has all that is needed");
        let ram = written_ram(backings()[0]);
        host.advise(ram.base(), mib(2), crate::host::Advice::HugePage).expect("it takes advice");
        clear(&host, &ram, Pages::Released).expect("it can be released");
        ram.words(ram.ranges()[0])[0].store(1, Ordering::Relaxed);
        assert_eq!(resident(&host, &ram), 1, "a touch brings one page, and no huge one");
    }

    #[test]
    fn memory_is_released_beside_giants_and_not_in_them() {
        let gpa = |start, bytes| GpaRange::new(Gpa::new(0) + start, bytes).expect("fits");
        let range = RamRange { gpa: gpa(gib(4), gib(4)), hva: Hva::new(1 << 40) };
        let at = |start| gpa(start, GIANT);
        let parts =
            |giants: &[GpaRange]| -> Vec<GpaRange> { without(range, giants).iter().map(|part| part.gpa).collect() };
        assert_eq!(parts(&[at(gib(1))]), [range.gpa], "one of another range");
        assert_eq!(parts(&[at(gib(4)), at(gib(6))]), [gpa(gib(5), gib(1)), gpa(gib(7), gib(1))]);
        assert_eq!(parts(&[at(gib(7))]), [gpa(gib(4), gib(3))]);
        assert_eq!(without(range, &[at(gib(4))])[0].hva, range.hva + gib(1));
        let all = [4, 5, 6, 7].map(|number| at(gib(number)));
        assert_eq!(parts(&all), []);
    }
}
