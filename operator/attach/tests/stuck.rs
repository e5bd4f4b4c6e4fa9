//! A host with a process that holds the lock of its memory map. Needs KVM, `/dev/fuse` and root
//! (`WIDELEAF_REQUIRE=kvm,fuse` turns a skip into a failure).
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use wideleaf_attach::find::{self, FindError};
use wideleaf_attach::process::ProcessError;
use wideleaf_attach::{AttachError, Attached, Places, Settings, Survey, VmProcess};
use wideleaf_control::view::VmView;
use wideleaf_memory::pool::HugetlbPools;
use wideleaf_policies::PolicyChoice;
use wideleaf_testing::stuck_process::{StuckProcess, be_the_stuck_process};

#[test]
#[ignore = "the process that the tests start"]
fn be_the_stuck_process_itself() {
    be_the_stuck_process();
}

fn look(pid: u32) -> Result<VmProcess, FindError> {
    find::with_pid(&Places::default(), pid)
}

fn is_silent(view: &VmView) -> bool {
    view.notes.iter().any(|note| note == "it does not answer: its memory map is locked")
}

#[test]
fn a_scan_of_all_processes_lists_every_one_and_marks_those_that_do_not_answer() {
    let (Some(mut stuck), Some(other)) = (StuckProcess::start(), StuckProcess::start()) else { return };
    let view_of = |pid: u32| {
        let found = find::all(&Places::default()).unwrap().guests;
        found.iter().find(|guest| guest.pid == pid).map(|guest| Survey::take(guest, None).view()).unwrap()
    };
    stuck.lock();
    for _ in 0..3 {
        assert!(is_silent(&view_of(stuck.pid())) && !is_silent(&view_of(other.pid())));
    }
    // Without a daemon, `top` takes a survey for each of these.
    let survey = Survey::take(&look(stuck.pid()).unwrap(), None);
    for notes in [survey.windows().notes, survey.explanation().notes] {
        assert!(notes.iter().any(|note| note.contains("does not answer")), "{notes:?}");
    }
    assert!(view_of(other.pid()).backing.is_some());
    let holders = HugetlbPools::of_this_machine().holders();
    assert!(!holders.hidden.contains(&stuck.pid()));
    stuck.unlock();
    while is_silent(&view_of(stuck.pid())) {
        std::thread::yield_now();
    }
}

#[test]
fn a_guest_that_hangs_cannot_be_attached_or_get_another_policy_but_can_be_detached() {
    let Some(mut stuck) = StuckProcess::start() else { return };
    let never = || Some(PolicyChoice::parse("never").unwrap());
    let mut attached =
        Attached::start(look(stuck.pid()).unwrap(), Settings { policy: never(), ..Settings::default() }).unwrap();
    // Read before it hangs: only the questions of attaching show that it does.
    let known = look(stuck.pid()).unwrap();
    stuck.lock();
    assert!(look(stuck.pid()).unwrap().no_answer.is_none(), "its arguments are not read again");
    let refused = attached.set_policy(None).unwrap_err();
    assert!(matches!(refused, AttachError::NoAnswer { .. }), "{refused}");
    let refused = Attached::start(known, Settings::default()).err().unwrap();
    assert!(matches!(refused, AttachError::NoAnswer { .. }), "{refused}");
    let view = attached.view();
    assert!(is_silent(&view), "{:?}", view.notes);
    assert!(!view.notes.iter().any(|note| note.contains("ksm_stat")), "{:?}", view.notes);
    attached.stop();
    let pid = stuck.pid();
    drop(stuck);
    assert!(matches!(look(pid), Err(FindError::Process(ProcessError::Gone(_)))));
}
