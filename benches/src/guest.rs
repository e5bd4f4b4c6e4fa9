//! A guest with the built-in image, in the process of a bench. Its output is kept, it can run for a slice of time, and
//! an error that its kernel finds in its memory ends the bench by a panic.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use wideleaf_guest_image::IMAGE;
use wideleaf_measure::order::arms_of_round;
use wideleaf_memory::{BackingConfig, GuestRam, SecondLevel};
use wideleaf_policies::{Bytes, Gpa, GpaRange};
use wideleaf_protocol::{Message, Status, parse};
use wideleaf_vmm::{GuestExit, HostLimits, ImageSource, Machine, VmConfig, VmOptions, WaitLimits};

use crate::moved::Mark;
use crate::scenario::{ScenarioError, Waiting};

/// Time limit for each phase; a guest that exceeds it hangs.
const GUEST_TIMEOUT: Duration = Duration::from_secs(600);
/// Interval between two checks of the guest's output.
const PACE: Duration = Duration::from_millis(1);

/// Configuration of a guest with one vCPU and 2 MiB guest pages.
#[derive(Clone, Debug)]
pub struct GuestSetup {
    /// Size of all guest RAM.
    pub memory: Bytes,
    /// Backing of the guest's RAM.
    pub backing: BackingConfig,
    /// Command line of the guest.
    pub cmdline: String,
    /// Size of the memslots; `None` uses the default.
    pub slot_bytes: Option<Bytes>,
}

/// Values from the guest's output so far.
#[derive(Default)]
struct GuestOutput {
    tsc_hz: u64,
    regions: Vec<(String, GpaRange)>,
    /// Phases with the arrival time of their first line.
    begun: Vec<(String, Instant)>,
    /// Progress of GUPS: the guest's clock and the number of completed updates.
    marks: Vec<(u64, u64)>,
    has_ended_updates: bool,
    /// Number of reports of a pass over all words; a pass shorter than 50 ms may have none.
    passes: u64,
    has_passed: Option<bool>,
    complaint: Option<String>,
}

impl GuestOutput {
    /// Updates per second of the guest's clock, from mark `first` to the last one.
    fn rate_from(&self, first: usize) -> Option<f64> {
        let (first, last) = (self.marks.get(first)?, self.marks.last()?);
        let is_whole = !self.has_ended_updates && last.0 > first.0;
        is_whole.then(|| (last.1 - first.1) as f64 / ((last.0 - first.0) as f64 / self.tsc_hz as f64))
    }
}

/// A running guest.
pub struct Guest {
    machine: Machine,
    second_level: Arc<dyn SecondLevel>,
    output: Arc<Mutex<GuestOutput>>,
}

impl Guest {
    /// Maps RAM for a guest that does not run yet.
    ///
    /// # Panics
    /// If the setup is invalid or there is too little memory.
    pub fn map_ram(setup: &GuestSetup) -> Arc<GuestRam> {
        GuestRam::map(&config(setup).ram_layout(), setup.backing).expect("memory for a guest")
    }

    /// Starts the guest in new RAM.
    ///
    /// # Panics
    /// Like [`Guest::map_ram`], and if KVM cannot create the guest.
    pub fn start(setup: &GuestSetup) -> Guest {
        Guest::start_in(setup, Guest::map_ram(setup))
    }

    /// Starts the guest in RAM from [`Guest::map_ram`].
    ///
    /// # Panics
    /// If KVM cannot create the guest.
    pub fn start_in(setup: &GuestSetup, ram: Arc<GuestRam>) -> Guest {
        let output = Arc::new(Mutex::new(GuestOutput::default()));
        let listener = Arc::clone(&output);
        let sink = Box::new(move |line: &[u8]| listen(&listener, &String::from_utf8_lossy(line)));
        let machine = Machine::start(&config(setup), ram, sink).expect("the built-in image starts");
        Guest { second_level: machine.second_level(), machine, output }
    }

    /// RAM of the guest.
    pub fn ram(&self) -> &Arc<GuestRam> {
        self.machine.ram()
    }

    /// Second-level tables of the guest in KVM.
    pub fn second_level(&self) -> &Arc<dyn SecondLevel> {
        &self.second_level
    }

    fn output(&self) -> MutexGuard<'_, GuestOutput> {
        self.output.lock()
    }

    /// Memory range that the guest reported under this name.
    ///
    /// # Panics
    /// If the guest has not reported such a range.
    pub fn region(&self, name: &str) -> GpaRange {
        let output = self.output();
        output.regions.iter().find(|(region, _)| region == name).expect("a guest names its regions first").1
    }

    /// Start time of a phase; waits until the phase has begun.
    ///
    /// # Errors
    /// [`ScenarioError`] if the phase does not begin.
    pub fn begin_of(&self, phase: &str, waiting: &Waiting) -> Result<Instant, ScenarioError> {
        let begin = || self.output().begun.iter().find(|(begun, _)| begun == phase).map(|(_, at)| *at);
        waiting.until("a phase of the guest", GUEST_TIMEOUT, PACE, || begin().is_some())?;
        Ok(begin().expect("a guest's output stays"))
    }

    /// Waits for the guest's first progress of updates.
    ///
    /// # Errors
    /// [`ScenarioError`] if the updates do not begin.
    pub fn updates_begin(&self, waiting: &Waiting) -> Result<(), ScenarioError> {
        waiting.until("the guest's first update", GUEST_TIMEOUT, PACE, || !self.output().marks.is_empty())
    }

    /// Marks of the guest's updates so far: seconds by its clock, and the number of completed updates.
    pub fn marks(&self) -> Vec<Mark> {
        let output = self.output();
        let hz = output.tsc_hz as f64;
        output.marks.iter().map(|(tsc, done)| (*tsc as f64 / hz, *done)).collect()
    }

    /// Waits until a guest with the kernel `pattern` has checked all its words: the second report from now on ends a
    /// pass that began after now.
    ///
    /// # Errors
    /// [`ScenarioError`] if the reports do not come.
    ///
    /// # Panics
    /// If the guest finds an error in its memory.
    pub fn check_all_words(&self, waiting: &Waiting) -> Result<(), ScenarioError> {
        let enough = self.output().passes + 2;
        let is_over = |output: &GuestOutput| output.passes >= enough || output.complaint.is_some();
        waiting.until("a pass of the guest over its words", GUEST_TIMEOUT, PACE, || is_over(&self.output()))?;
        assert_eq!(self.output().complaint, None);
        Ok(())
    }

    /// Pauses the vCPU until [`Guest::resume`].
    ///
    /// # Panics
    /// If the vCPU does not leave the guest.
    pub fn pause(&self) {
        self.second_level.pause().expect("a running guest can be paused");
    }

    /// Ends [`Guest::pause`].
    ///
    /// # Panics
    /// If the guest is not paused.
    pub fn resume(&self) {
        self.second_level.resume().expect("the guest was paused");
    }

    /// Lets a paused guest run for `time`. Returns its updates per second of its own clock between the first and the
    /// last progress line of that time, which excludes the pause and the switch. `None` if its updates ended.
    ///
    /// # Errors
    /// [`ScenarioError::Interrupted`].
    pub fn slice(&self, time: Duration, waiting: &Waiting) -> Result<Option<f64>, ScenarioError> {
        let before = self.output().marks.len();
        self.resume();
        waiting.pass(time)?;
        self.pause();
        Ok(self.output().rate_from(before))
    }

    /// Lets the guest run to its end, at which it checks its memory.
    ///
    /// # Errors
    /// [`ScenarioError::Interrupted`].
    ///
    /// # Panics
    /// If the guest finds an error in its memory.
    pub fn finish(self, waiting: &Waiting) -> Result<(), ScenarioError> {
        let exit = self.machine.wait(WaitLimits { timeout: Some(GUEST_TIMEOUT), stop: Some(waiting.flag()) });
        if exit == GuestExit::Stopped {
            return Err(ScenarioError::Interrupted);
        }
        assert_eq!(exit, GuestExit::ExitPort(0), "{:?}", self.output().complaint);
        assert_eq!(self.output().has_passed, Some(true), "the guest did not check its memory");
        Ok(())
    }

    /// Stops a guest that checks its memory all the time.
    ///
    /// # Panics
    /// If the guest has found an error.
    pub fn stop(self) {
        let exit = self.machine.stop();
        assert_eq!((exit, &self.output().complaint), (GuestExit::Stopped, &None));
    }
}

fn config(setup: &GuestSetup) -> VmConfig {
    let options = VmOptions {
        memory: setup.memory,
        cmdline: setup.cmdline.clone(),
        slot_bytes: setup.slot_bytes,
        ..VmOptions::new(ImageSource::Bytes(IMAGE.into()), setup.backing)
    };
    VmConfig::new(options, &HostLimits::none()).expect("a plain guest")
}

fn listen(output: &Mutex<GuestOutput>, line: &str) {
    let mut output = output.lock();
    match parse(line) {
        Some(Ok(Message::Hello { tsc_hz, .. })) => output.tsc_hz = tsc_hz,
        Some(Ok(Message::Region { name, address, bytes })) => {
            let range = GpaRange::new(Gpa::new(address), Bytes::new(bytes)).expect("a guest's memory fits 64 bits");
            output.regions.push((name.as_str().to_owned(), range));
        }
        Some(Ok(Message::Begin { phase, .. })) => output.begun.push((phase.as_str().to_owned(), Instant::now())),
        Some(Ok(Message::Progress { phase, tsc, done, .. })) if phase.as_str() == "update" => {
            output.marks.push((tsc, done));
        }
        Some(Ok(Message::Progress { phase, .. })) if phase.as_str() == "pass" => output.passes += 1,
        Some(Ok(Message::End { phase, .. })) if phase.as_str() == "update" => output.has_ended_updates = true,
        Some(Ok(Message::Verify { status, .. })) => output.has_passed = Some(status == Status::Pass),
        Some(Ok(Message::Mismatch(_) | Message::Panic { .. })) => output.complaint = Some(line.to_owned()),
        _ => {}
    }
}

/// Lets paused guests run in turns: at most `turns_max` of them, and only while all guests have updates left. In each
/// turn every guest runs for `slice` while the others are paused; the first guest changes from turn to turn. Returns
/// the updates per second of each guest, by turn.
///
/// # Errors
/// [`ScenarioError::Interrupted`].
pub fn take_turns(
    guests: &[&Guest],
    turns_max: u32,
    slice: Duration,
    waiting: &Waiting,
) -> Result<Vec<Vec<f64>>, ScenarioError> {
    let mut turns = Vec::new();
    for number in 0..turns_max {
        let mut rates = vec![0.0; guests.len()];
        for index in arms_of_round(guests.len(), number + 1) {
            let Some(rate) = guests[index].slice(slice, waiting)? else { return Ok(turns) };
            rates[index] = rate;
        }
        turns.push(rates);
    }
    Ok(turns)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_of_passes_are_counted_and_a_wrong_word_is_a_complaint() {
        let output = Mutex::new(GuestOutput::default());
        let mut lines = vec!["@wideleaf progress phase=pages tsc=1 done=1 total=9", "the guest's own words"];
        lines.extend(["@wideleaf progress phase=pass tsc=2 done=1 total=9"; 2]);
        lines.iter().for_each(|line| listen(&output, line));
        let seen = |output: &GuestOutput| (output.passes, output.marks.len(), output.complaint.clone());
        assert_eq!(seen(&output.lock()), (2, 0, None));
        let wrong = "@wideleaf mismatch address=0x1000 expected=0x1 found=0x2 kind=zero";
        listen(&output, wrong);
        assert_eq!(output.lock().complaint.as_deref(), Some(wrong));
    }
}
