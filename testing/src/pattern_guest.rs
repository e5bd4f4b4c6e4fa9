//! A guest with vCPUs that check and rewrite every word of its RAM, and its reports. A lost word is reported at
//! most two passes later.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use wideleaf_guest_image::IMAGE;
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam};
use wideleaf_policies::{Bytes, PageSize};
use wideleaf_protocol::{Message, parse};
use wideleaf_vmm::run_loop::VcpuState;
use wideleaf_vmm::{GuestExit, HostLimits, ImageSource, Machine, VmConfig, VmOptions};

/// Longest time of a pass, also on the emulated processors of a lab.
const PASS_MAX: Duration = Duration::from_secs(400);
/// Longest time that a vCPU's thread waits for a processor.
const RESUMED_WITHIN: Duration = Duration::from_secs(30);
/// Interval between two checks for a finished pass.
const LOOK_INTERVAL: Duration = Duration::from_millis(2);

/// A running pattern guest. Dropping it stops it.
pub struct PatternGuest {
    machine: Machine,
    said: Arc<Mutex<GuestReports>>,
}

/// Reports of the guest.
#[derive(Debug, Default)]
struct GuestReports {
    /// Number of bytes that it checks.
    checked: Bytes,
    passes: u64,
    /// A report of a wrong word, or of its own end.
    bad_news: Option<String>,
}

impl PatternGuest {
    /// Starts a guest of two vCPUs with base pages of this kind, in memslots of `slot_bytes`. It checks `checked`
    /// bytes of its memory, or all of it except its own program, and does not touch the rest.
    ///
    /// # Panics
    /// Panics if it cannot start.
    pub fn start(kind: BackingKind, memory: Bytes, slot_bytes: Bytes, checked: Option<Bytes>) -> PatternGuest {
        let backing = BackingConfig::new(kind, PageSize::Base4K).expect("all kinds but hugetlb have base pages");
        let checked = checked.map_or_else(String::new, |checked| format!(" bytes={}", checked.get()));
        let options = VmOptions {
            memory,
            vcpus: 2,
            cmdline: format!("kernel=pattern passes=1000000{checked}"),
            slot_bytes: Some(slot_bytes),
            ..VmOptions::new(ImageSource::Bytes(IMAGE.into()), backing)
        };
        let config = VmConfig::new(options, &HostLimits::none()).expect("a valid configuration");
        let ram = GuestRam::map(&config.ram_layout(), backing).expect("there is enough memory");
        let said = Arc::<Mutex<GuestReports>>::default();
        let listener = Arc::clone(&said);
        let sink = move |line: &[u8]| locked(&listener).hear(&String::from_utf8_lossy(line));
        PatternGuest { machine: Machine::start(&config, ram, Box::new(sink)).expect("KVM is there"), said }
    }

    /// The running VM.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Number of bytes that it checks; zero until it has reported it.
    pub fn checked(&self) -> Bytes {
        locked(&self.said).checked
    }

    /// Number of passes that it has reported.
    pub fn passes(&self) -> u64 {
        locked(&self.said).passes
    }

    /// Waits until every word has been checked at least once from now on: the second report ends a pass that began
    /// after now.
    ///
    /// # Panics
    /// Panics if the guest hangs, has ended or has found a wrong word.
    pub fn check_all_words(&self) {
        for _ in 0..2 {
            let (before, deadline) = (self.passes(), Instant::now() + PASS_MAX);
            while self.passes() == before {
                self.assert_no_word_was_lost();
                assert!(Instant::now() < deadline, "no pass in {PASS_MAX:?}: {:?}", self.machine.vcpu_states());
                std::thread::sleep(LOOK_INTERVAL);
            }
        }
    }

    /// Asserts that the guest runs. A resumed vCPU counts as running once its thread gets a processor.
    ///
    /// # Panics
    /// Panics if a vCPU stays paused or has ended.
    pub fn assert_all_vcpus_run(&self) {
        let deadline = Instant::now() + RESUMED_WITHIN;
        while self.machine.vcpu_states().iter().any(|state| *state != VcpuState::Running) {
            assert!(Instant::now() < deadline, "{:?}", self.machine.vcpu_states());
            std::thread::sleep(LOOK_INTERVAL);
        }
    }

    /// Stops the guest and asserts that it found no wrong word: after one it would have ended by itself.
    ///
    /// # Panics
    /// Panics if the guest found a wrong word.
    pub fn stop(&self) {
        let exit = self.machine.stop();
        self.assert_no_word_was_lost();
        assert_eq!(exit, GuestExit::Stopped);
    }

    fn assert_no_word_was_lost(&self) {
        assert_eq!(locked(&self.said).bad_news, None);
    }
}

impl GuestReports {
    fn hear(&mut self, line: &str) {
        match parse(line) {
            Some(Ok(Message::Region { bytes, .. })) => self.checked = Bytes::new(bytes),
            Some(Ok(Message::Progress { phase, done, .. })) if phase == *"pass" => self.passes = done,
            Some(Ok(Message::Mismatch(_) | Message::Panic { .. } | Message::Exit { .. })) => {
                self.bad_news.get_or_insert_with(|| line.to_owned());
            }
            _ => {}
        }
    }
}

fn locked(said: &Mutex<GuestReports>) -> MutexGuard<'_, GuestReports> {
    said.lock()
}
