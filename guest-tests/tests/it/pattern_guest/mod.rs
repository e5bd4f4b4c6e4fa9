//! A guest that checks and rewrites a pattern until the test stops it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use wideleaf_guest_image::IMAGE;
use wideleaf_memory::numa::placement::Placement;
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam};
use wideleaf_policies::units::gib;
use wideleaf_policies::{Bytes, PageSize, WindowIndex};
use wideleaf_protocol::{Message, parse};
use wideleaf_vmm::{GuestExit, HostLimits, ImageSource, Machine, VmConfig, VmOptions};

/// Longest wait for a step. On two idle processors one in the NPT lab takes some seconds, on busy ones minutes.
const WAIT_MAX: Duration = Duration::from_secs(400);

/// A guest with two vCPUs that check and rewrite a pattern until it is stopped, and its output.
pub struct PatternGuest {
    pub ram: Arc<GuestRam>,
    pub machine: Machine,
    lines: Arc<Mutex<Vec<String>>>,
}

impl PatternGuest {
    /// Starts the guest. `memory` is all of its RAM, from address zero.
    pub fn start(memory: Bytes) -> PatternGuest {
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap();
        PatternGuest::start_on(memory, backing, "32M", Placement::default())
    }

    /// The same on RAM of this kind, with a pattern in that part of it, and with pages on these nodes.
    pub fn start_on(memory: Bytes, backing: BackingConfig, pattern: &str, placement: Placement) -> PatternGuest {
        let options = VmOptions {
            memory,
            vcpus: 2,
            cmdline: format!("kernel=pattern bytes={pattern} passes=1000000"),
            slot_bytes: Some(gib(1)),
            ..VmOptions::new(ImageSource::Bytes(IMAGE.into()), backing)
        };
        let config = VmConfig::new(options, &HostLimits::none()).unwrap();
        let ram = GuestRam::map_on(&config.ram_layout(), backing, placement).unwrap();
        let lines = Arc::<Mutex<Vec<String>>>::default();
        let sink = Arc::clone(&lines);
        let sink = move |line: &[u8]| sink.lock().push(String::from_utf8_lossy(line).into_owned());
        let machine = Machine::start(&config, Arc::clone(&ram), Box::new(sink)).unwrap();
        PatternGuest { ram, machine, lines }
    }

    /// Number of whole passes that it has reported.
    fn passes(&self) -> u64 {
        let lines = self.lines.lock();
        let done = |line: &String| match parse(line)?.ok()? {
            Message::Progress { phase, done, .. } if phase == *"pass" => Some(done),
            _ => None,
        };
        lines.iter().rev().find_map(done).unwrap_or(0)
    }

    /// Waits until every word has been checked at least once from now on: the second report ends a pass that began
    /// after now.
    pub fn check_all_words(&self) {
        for _ in 0..2 {
            let (before, deadline) = (self.passes(), Instant::now() + WAIT_MAX);
            while self.passes() == before {
                assert!(Instant::now() < deadline, "no pass in {WAIT_MAX:?}: {:?}", self.lines.lock().last());
                std::thread::sleep(Duration::from_millis(2));
            }
        }
    }

    /// Waits until its first giant is on a giant page, or is not, and is not being moved.
    #[allow(dead_code, reason = "not every test moves it from another thread")]
    pub fn wait_until_on_giant_page(&self, is_on_giant_page: bool) {
        let deadline = Instant::now() + WAIT_MAX;
        let (claims, first) = (self.ram.claims(), WindowIndex::new(0));
        while claims.is_under_way(first) || claims.is_on_giant_page(first) != is_on_giant_page {
            assert!(Instant::now() < deadline, "the giant is not moved: {:?}", self.lines.lock().last());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Stops the guest and asserts that it found no wrong word: after one it would have ended by itself.
    pub fn stop(&self) {
        let exit = self.machine.stop();
        let lines = self.lines.lock();
        let is_about_a_loss =
            |line: &String| matches!(parse(line), Some(Ok(Message::Mismatch(_) | Message::Panic { .. })));
        assert_eq!(lines.iter().find(|line| is_about_a_loss(line)), None);
        assert_eq!(exit, GuestExit::Stopped, "{:?}", lines.last());
    }
}
