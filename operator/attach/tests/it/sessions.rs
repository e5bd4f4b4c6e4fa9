//! Real QEMU guests under the manager: promoted, left alone, detached, and never a byte lost. They need QEMU and
//! KVM (`WIDELEAF_REQUIRE=qemu,kvm` turns a skip into a failure).

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use wideleaf_attach::session::{Attached, Settings, plan};
use wideleaf_attach::survey::Survey;
use wideleaf_control::view::{Care, GuestPagesView, Reason, VmView, WindowRange};
use wideleaf_memory::host::process::ProcessHost;
use wideleaf_memory::host::{Advice, Host as _};
use wideleaf_policies::units::{kib, mib};
use wideleaf_policies::{Bytes, Hva, PageSize, PolicyChoice};

use crate::qemu::{Guest, can_run, eventually};

/// Memory that the guest walks over.
pub const IN_USE: Bytes = mib(64);

const SHARED: [&str; 6] =
    ["-object", "memory-backend-ram,id=a,size=128M,share=on", "-machine", "microvm,memory-backend=a", "-m", "128M"];

fn greedy() -> Settings {
    Settings { policy: Some(PolicyChoice::parse("greedy").unwrap()), ..Settings::default() }
}

/// A guest at work on all of its pattern.
pub fn at_work(arguments: &[&str]) -> Guest {
    at_work_with(arguments, "")
}

/// As [`at_work`], with more on the guest's own command line.
pub fn at_work_with(arguments: &[&str], more: &str) -> Guest {
    let guest = Guest::start(arguments, more);
    let process = guest.process();
    eventually("a guest at work", || Survey::take(&process, None).view().resident() >= Some(IN_USE.get()));
    eventually("its second pass", || guest.console().contains(" progress "));
    guest
}

/// Splits every huge page of the guest, so that there is something to promote.
pub fn split_all(guest: &Guest) {
    let host = ProcessHost::open(guest.pid()).unwrap();
    for piece in Survey::take(&guest.process(), None).view().ram {
        for start in (piece.hva..piece.hva + piece.bytes).step_by(PageSize::Huge2M.bytes().as_usize()) {
            host.advise(Hva::new(start), kib(4), Advice::Cold).unwrap();
        }
    }
}

fn done(view: &VmView) -> u64 {
    let work = view.work.as_ref().unwrap();
    work.outcomes.get("collapse").and_then(|outcomes| outcomes.get("done")).copied().unwrap_or(0)
}

pub fn assert_no_byte_was_lost(guest: &Guest) {
    let passes = |console: &str| console.matches(" progress ").count();
    let before = passes(&guest.console());
    eventually("another pass over its memory", || passes(&guest.console()) > before + 1);
    assert_eq!(guest.said().complaint, None);
}

#[test]
fn a_guest_on_base_pages_is_promoted_while_it_runs_and_loses_no_byte() {
    if can_run() {
        let guest = at_work(&["-M", "microvm", "-m", "128M"]);
        split_all(&guest);
        let settings = Settings { qmp: Some(guest.qmp()), ..greedy() };
        let attached = Attached::start(guest.process(), settings).unwrap();
        eventually("huge pages", || attached.view().backing.unwrap().huge_2m >= IN_USE.get() - mib(8).get());
        let view = attached.view();
        assert!(done(&view) > 16, "{:?}", view.work);
        assert_eq!((view.care, view.policy.as_deref()), (Care::Managed, Some("greedy")));
        let explanation = attached.explain();
        let small = explanation.reasons.iter().map(|r| r.windows).sum::<u64>();
        assert_eq!(explanation.huge.map(|huge| huge + small), explanation.windows);
        let windows = attached.windows();
        assert_eq!(windows.ranges.iter().map(|range| range.backing.len()).sum::<usize>(), 64);
        let ages = [view.scan_age_s, explanation.scan_age_s, windows.scan_age_s];
        assert!(ages.iter().all(|age| age.is_some_and(|age| (0.0..3600.0).contains(&age))), "{ages:?}");
        let seen = Survey::take(attached.process(), None).view();
        assert!(
            seen.backing.unwrap().huge_2m >= IN_USE.get() - mib(8).get(),
            "a survey from outside agrees: {:?}",
            seen.backing
        );
        attached.stop();
        assert_no_byte_was_lost(&guest);
    }
}

#[test]
fn shared_memory_is_promoted_only_where_that_is_allowed() {
    if can_run() {
        let guest = at_work(&SHARED);
        if Survey::take(&guest.process(), None).view().backing.unwrap().huge_2m > 0 {
            return eprintln!("skipped: this host makes shared memory huge by itself (shmem_enabled)");
        }
        let attached = Attached::start(guest.process(), greedy()).unwrap();
        assert!(attached.explain().reasons.iter().any(|reason| reason.name == "shared_memory_stalls"));
        assert_eq!(done(&attached.view()), 0);
        attached.stop();
        let allowed = Attached::start(guest.process(), Settings { may_collapse_shared: true, ..greedy() }).unwrap();
        eventually("huge pages", || allowed.view().backing.unwrap().huge_2m > 0);
        assert_no_byte_was_lost(&guest);
    }
}

#[test]
fn a_guest_with_its_policy_off_is_only_observed_until_that_changes() {
    if can_run() {
        let guest = at_work(&["-M", "microvm", "-m", "128M"]);
        split_all(&guest);
        let mut attached = Attached::start(guest.process(), Settings::default()).unwrap();
        assert_eq!((attached.view().care, done(&attached.view())), (Care::Off, 0));
        attached.set_policy(greedy().policy).unwrap();
        eventually("a promotion", || done(&attached.view()) > 0);
        let refused = attached.set_policy(Some(PolicyChoice::parse("at-fault").unwrap())).unwrap_err();
        assert!(refused.to_string().contains("at-fault"), "{refused}");
        attached.set_policy(None).unwrap();
        assert_eq!(attached.view().care, Care::Off);
        assert!(done(&attached.view()) > 0, "counters go on");
    }
}

#[test]
fn a_guest_that_is_asked_to_be_left_alone_is_not_touched() {
    if can_run() {
        let guest = at_work(&["-M", "microvm", "-m", "128M"]);
        let mut attached = Attached::start(guest.process(), Settings::default()).unwrap();
        attached.leave_alone(true);
        split_all(&guest);
        attached.set_policy(greedy().policy).unwrap();
        let is_waiting = |reason: &Reason| reason.name == "left_alone_asked" && reason.windows >= 16;
        eventually("a tick that leaves it alone", || attached.explain().reasons.iter().any(is_waiting));
        assert_no_byte_was_lost(&guest);
        let view = attached.view();
        assert!(matches!(&view.care, Care::LeftAlone { reason } if reason.contains("asked")), "{:?}", view.care);
        assert_eq!(done(&view), 0);
        attached.leave_alone(false);
        eventually("a promotion", || done(&attached.view()) > 0);
    }
}

#[test]
fn a_guest_that_is_left_alone_from_the_start_is_not_touched_by_the_first_tick() {
    if can_run() {
        let guest = at_work(&["-M", "microvm", "-m", "128M"]);
        split_all(&guest);
        let attached = Attached::start(guest.process(), Settings { is_left_alone: true, ..greedy() }).unwrap();
        let is_waiting = |reason: &Reason| reason.name == "left_alone_asked" && reason.windows >= 16;
        eventually("a tick that leaves it alone", || attached.explain().reasons.iter().any(is_waiting));
        assert_eq!(done(&attached.view()), 0);
        attached.leave_alone(false);
        eventually("a promotion", || done(&attached.view()) > 0);
    }
}

#[test]
fn a_guest_has_one_manager_at_a_time() {
    if can_run() {
        let guest = at_work(&["-M", "microvm", "-m", "128M"]);
        let first = Attached::start(guest.process(), Settings::default()).unwrap();
        let refused = Attached::start(guest.process(), greedy()).err().unwrap();
        assert!(refused.to_string().contains("has a manager already"), "{refused}");
        first.stop();
        assert!(Attached::start(guest.process(), greedy()).is_ok());
    }
}

#[test]
fn a_guest_that_ends_is_gone_and_cannot_be_attached_again() {
    if can_run() {
        let mut guest = at_work(&["-M", "microvm", "-m", "128M"]);
        let process = guest.process();
        let attached = Attached::start(process.clone(), greedy()).unwrap();
        guest.kill();
        eventually("the end", || attached.has_ended());
        assert!(Attached::start(process, greedy()).is_err());
    }
}

/// Sends commands to QEMU over a monitor with no other client.
pub fn tell(monitor: &Path, commands: &[Value]) {
    let mut stream = UnixStream::connect(monitor).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    for command in [&json!({ "execute": "qmp_capabilities" })].into_iter().chain(commands) {
        writeln!(stream, "{command}").unwrap();
        // A greeting and events come between.
        let answer =
            lines.by_ref().map(Result::unwrap).find(|line| line.contains("\"return\"") || line.contains("\"error\""));
        assert!(answer.as_ref().is_some_and(|line| line.contains("\"return\"")), "{command}: {answer:?}");
    }
}

#[test]
fn memory_that_is_plugged_in_later_is_managed_and_counters_go_on() {
    if can_run() {
        let folder = tempfile::tempdir().unwrap();
        let second = folder.path().join("second");
        let socket = format!("unix:{},server=on,wait=off", second.display());
        let guest = at_work(&["-M", "q35", "-m", "128M,slots=2,maxmem=512M", "-qmp", &socket]);
        split_all(&guest);
        let attached = Attached::start(guest.process(), Settings { qmp: Some(guest.qmp()), ..greedy() }).unwrap();
        eventually("promotions", || done(&attached.view()) > 16);
        let before = done(&attached.view());
        let object =
            json!({ "qom-type": "memory-backend-ram", "id": "plugged", "size": mib(128).get(), "prealloc": true });
        let device = json!({ "driver": "pc-dimm", "id": "dimm", "memdev": "plugged" });
        let plug = [
            json!({ "execute": "object-add", "arguments": object }),
            json!({ "execute": "device_add", "arguments": device }),
        ];
        tell(&second, &plug);
        let plugged = || attached.view().ram.into_iter().find(|piece| piece.name == "plugged");
        eventually("the plugged piece", || plugged().is_some());
        let piece = plugged().unwrap();
        assert_eq!((piece.gpa, piece.bytes, attached.view().ram.len()), (4 << 30, mib(128).get(), 2));
        assert!(done(&attached.view()) >= before, "counters go on");
        // QEMU has touched all of it for `prealloc`, so that the manager sees 64 windows with pages.
        let is_present =
            |range: &WindowRange| range.gpa == 4 << 30 && range.backing.len() == 64 && !range.backing.contains('.');
        eventually("its windows under the manager", || attached.windows().ranges.iter().any(is_present));
        assert_eq!(attached.explain().windows, Some(128));
        attached.stop();
        assert_no_byte_was_lost(&guest);
    }
}

fn by(policy: &str) -> Settings {
    Settings { policy: Some(PolicyChoice::parse(policy).unwrap()), ..Settings::default() }
}

/// Page sizes that a manager sees in the tables of a guest that maps all its memory with pages of size `own`.
fn guest_pages(own: &str, policy: &str) -> GuestPagesView {
    let guest = at_work_with(&["-M", "microvm", "-m", "128M"], &format!("guest_pages={own}"));
    let attached = Attached::start(guest.process(), Settings { qmp: Some(guest.qmp()), ..by(policy) }).unwrap();
    eventually("the guest's own tables", || attached.view().guest_pages.is_some());
    let pages = attached.view().guest_pages.unwrap();
    assert_eq!(attached.explain().guest_pages.as_deref(), Some(&pages));
    attached.stop();
    assert_no_byte_was_lost(&guest);
    pages
}

#[test]
fn the_guests_own_page_sizes_are_read_from_its_tables_through_its_monitor() {
    if can_run() {
        let in_use = IN_USE.get() / PageSize::Huge2M.bytes().get();
        let large = guest_pages("2m", "aligned");
        assert!(large.huge_2m >= in_use && large.base_4k <= 1, "{large:?}");
        let small = guest_pages("4k", "auto");
        assert!(small.base_4k >= in_use && small.huge_2m == 0, "{small:?}");
        for pages in [large, small] {
            let all = pages.base_4k + pages.huge_2m + pages.giant_1g + pages.mixed + pages.unmapped + pages.unknown;
            assert_eq!(all, 64, "{pages:?}");
        }
    }
}

#[test]
fn a_policy_that_needs_the_guests_page_sizes_brings_a_note_on_what_would_provide_them() {
    if can_run() {
        let guest = at_work(&["-M", "microvm", "-m", "128M"]);
        let told = |policy: &str| {
            let attached = Attached::start(guest.process(), by(policy)).unwrap();
            let view = attached.view();
            assert_eq!(view.guest_pages, None);
            view.notes.iter().any(|note| note.contains("own page sizes are not known: needs a QMP socket"))
        };
        assert!(told("aligned") && !told("greedy"), "greedy does not ask");
    }
}

#[test]
fn a_plan_lists_the_actions_and_takes_none() {
    if can_run() {
        let guest = at_work(&["-M", "microvm", "-m", "128M"]);
        split_all(&guest);
        let lines = plan(&guest.process(), &greedy()).unwrap();
        assert!(lines.iter().any(|line| line.contains("may be promoted, as greedy chooses")), "{lines:?}");
        let off = plan(&guest.process(), &Settings::default()).unwrap();
        assert!(off.iter().any(|line| line.contains("the policy is off")), "{off:?}");
        let never = plan(&guest.process(), &by("never")).unwrap();
        assert!(never.iter().any(|line| line.contains("the policy in force promotes nothing")), "{never:?}");
        assert!(!never.iter().any(|line| line.contains("may be promoted")), "{never:?}");
    }
}
