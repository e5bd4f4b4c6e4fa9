//! Minor faults in memory, for tests without a kernel. The mapped pages are those of the [`FakeHost`], and the file has
//! the pages that were mapped at first. The test makes the touches, and every call can be made to fail. A thread that
//! waits is an entry of a list: no test blocks.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use wideleaf_policies::{Hva, PageSize, WindowIndex};

use crate::host::{Host, HostError, PageRun};
use crate::region::RamRange;
use crate::sensors::minor_faults::MinorFaults;
use crate::testing::fake_calls::FakeCalls;
use crate::testing::fake_host::FakeHost;

/// Fake minor faults; see the module.
#[derive(Debug)]
pub struct FakeMinorFaults {
    host: Arc<FakeHost>,
    range: RamRange,
    file: Vec<PageRun>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    watched: BTreeSet<WindowIndex>,
    /// Windows of the waiting threads, one entry for each.
    waiting: Vec<WindowIndex>,
    /// Entries of `waiting` with a message that is not read yet.
    unread: Vec<WindowIndex>,
    calls: FakeCalls,
    /// Number of further calls that fail after the first failed one, and their errno.
    failing_on: (u64, i32),
}

impl FakeMinorFaults {
    /// Minor faults of the RAM at `range`, as it is mapped on the host now.
    ///
    /// # Panics
    /// If the host was told to fail the next call.
    pub fn new(host: Arc<FakeHost>, range: RamRange) -> FakeMinorFaults {
        let mut file = Vec::new();
        host.scan(range.hva, range.gpa.bytes(), &mut file).expect("this call is not made to fail");
        FakeMinorFaults { host, range, file, state: Mutex::default() }
    }

    /// The descriptor: dropping it wakes all waiting threads.
    pub fn open(faults: &Arc<FakeMinorFaults>) -> Arc<dyn MinorFaults> {
        Arc::new(Open(faults.clone()))
    }

    /// Touches the window like the guest, at a page that is not mapped if there is one. Returns whether the touch waits
    /// for an answer.
    pub fn touch(&self, window: WindowIndex) -> bool {
        let mut state = self.state();
        if !state.watched.contains(&window) || self.is_mapped(window) {
            self.map(window);
            return false;
        }
        state.waiting.push(window);
        state.unread.push(window);
        true
    }

    /// Touches all windows that are not watched.
    pub fn map_all(&self) {
        for window in self.range.gpa.windows().filter(|window| !self.state().watched.contains(window)) {
            self.map(window);
        }
    }

    /// Number of waiting threads.
    pub fn waiting(&self) -> usize {
        self.state().waiting.len()
    }

    /// Whether any window is watched.
    pub fn is_anything_watched(&self) -> bool {
        !self.state().watched.is_empty()
    }

    /// The `call`-th call from now on (the next is 0) and those behind it, `times` in all, fail with `errno`.
    pub fn fail_calls(&self, call: u64, times: u64, errno: i32) {
        let mut state = self.state();
        state.calls.fail(call, errno);
        state.failing_on = (times.saturating_sub(1), errno);
    }

    fn hva(&self, window: WindowIndex) -> Hva {
        self.range.hva + (window.start() - self.range.gpa.start())
    }

    /// Whether all pages are mapped that the file has of the window.
    fn is_mapped(&self, window: WindowIndex) -> bool {
        let page = PageSize::Base4K;
        self.in_file(window).all(|run| {
            (0..run.bytes.pages(page)).all(|number| self.host.has_page(run.start + page.bytes() * number, page.bytes()))
        })
    }

    /// Runs of the window's pages in the file.
    fn in_file(&self, window: WindowIndex) -> impl Iterator<Item = PageRun> + '_ {
        let (start, end) = (self.hva(window), self.hva(window) + PageSize::Huge2M.bytes());
        self.file.iter().filter_map(move |run| {
            let (from, to) = (run.start.max(start), (run.start + run.bytes).min(end));
            (from < to).then(|| PageRun { start: from, bytes: to - from, is_huge: run.is_huge })
        })
    }

    /// Maps the file's pages of the window.
    fn map(&self, window: WindowIndex) {
        self.in_file(window).for_each(|run| self.host.make_present(run.start, run.bytes, run.is_huge));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn enter(&self, what: &'static str) -> Result<MutexGuard<'_, State>, HostError> {
        let mut state = self.state();
        if let Err(source) = state.calls.enter() {
            if let (1.., errno) = state.failing_on {
                state.failing_on.0 -= 1;
                state.calls.fail(0, errno);
            }
            return Err(HostError { what, source });
        }
        Ok(state)
    }

    fn let_go(&self, state: &mut State, window: WindowIndex) {
        if state.waiting.contains(&window) && !self.is_mapped(window) {
            self.map(window);
        }
        state.waiting.retain(|waits| *waits != window);
        // A thread that continues removes its message, as in the kernel.
        state.unread.retain(|waits| *waits != window);
    }
}

struct Open(Arc<FakeMinorFaults>);

impl MinorFaults for Open {
    fn watch(&self, window: WindowIndex) -> Result<(), HostError> {
        self.0.enter("fake watch")?.watched.insert(window);
        Ok(())
    }

    fn unwatch(&self, window: WindowIndex) -> Result<(), HostError> {
        let mut state = self.0.enter("fake unwatch")?;
        state.watched.remove(&window);
        self.0.let_go(&mut state, window);
        Ok(())
    }

    fn unmap(&self, window: WindowIndex, pages: Range<u16>) -> Result<(), HostError> {
        let _state = self.0.enter("fake unmap")?;
        let page = PageSize::Base4K.bytes();
        self.0.host.make_absent(self.0.hva(window) + page * u64::from(pages.start), page * pages.len() as u64);
        Ok(())
    }

    fn map_from_file(&self, window: WindowIndex) -> Result<(), HostError> {
        let mut state = self.0.enter("fake continue")?;
        if !state.watched.contains(&window) {
            return Err(HostError { what: "fake continue", source: io::Error::from_raw_os_error(libc::ENOENT) });
        }
        self.0.map(window);
        self.0.let_go(&mut state, window);
        Ok(())
    }

    fn read_touches(&self, touches: &mut Vec<WindowIndex>) -> Result<(), HostError> {
        touches.append(&mut self.0.enter("fake read")?.unread);
        Ok(())
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let mut state = self.0.state();
        for window in std::mem::take(&mut state.watched) {
            self.0.let_go(&mut state, window);
        }
    }
}
