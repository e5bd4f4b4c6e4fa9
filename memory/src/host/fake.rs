//! A host in memory for tests: pages are entries of a map, time passes only when somebody sleeps or an advice is
//! taken, and every call can be made to fail.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Mutex;
use std::time::Duration;

use wideleaf_policies::{Bytes, Hva, Moment, PageSize};

use super::{Advice, Host, HostError, PageRun};
use crate::fake_calls::FakeCalls;

/// What one collapse takes on the fake host.
pub const COLLAPSE_TIME: Duration = Duration::from_micros(600);

/// See the module.
#[derive(Debug, Default)]
pub struct FakeHost {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    now: Duration,
    /// Address of each base page that is present, and whether it is part of a huge page.
    pages: BTreeMap<u64, bool>,
    /// Windows (by address) marked `MADV_NOHUGEPAGE`.
    no_huge: BTreeSet<u64>,
    /// Windows (by address) marked `MADV_HUGEPAGE`.
    huge: BTreeSet<u64>,
    calls: FakeCalls,
    fail_advice: Vec<(Advice, i32, u64)>,
    collapse_does_nothing: bool,
    cold_does_nothing: bool,
}

const PAGE: u64 = PageSize::Base4K.bytes().get();
const WINDOW: u64 = PageSize::Huge2M.bytes().get();

impl FakeHost {
    /// A host on which exactly these pages are present.
    pub fn with_runs(runs: Vec<PageRun>) -> FakeHost {
        let host = FakeHost::default();
        for run in runs {
            host.make_present(run.start, run.bytes, run.is_huge);
        }
        host
    }

    /// Makes a range present in base pages, or in huge ones.
    pub fn make_present(&self, start: Hva, bytes: Bytes, is_huge: bool) {
        self.state().pages.extend(pages(start, bytes).map(|page| (page, is_huge)));
    }

    /// Makes a range absent.
    pub fn make_absent(&self, start: Hva, bytes: Bytes) {
        let mut state = self.state();
        for page in pages(start, bytes) {
            state.pages.remove(&page);
        }
    }

    /// Marks a range `MADV_NOHUGEPAGE`, as RAM that starts with base pages is.
    pub fn forbid_huge(&self, start: Hva, bytes: Bytes) {
        self.state().no_huge.extend(windows(start, bytes));
    }

    /// The `call`-th call from now on (the next is 0) fails with `errno`, once.
    pub fn fail_call(&self, call: u64, errno: i32) {
        self.state().calls.fail(call, errno);
    }

    /// The next `times` uses of an advice fail with `errno`.
    pub fn fail_advice(&self, advice: Advice, errno: i32, times: u64) {
        self.state().fail_advice.push((advice, errno, times));
    }

    /// From now on a collapse says yes and does nothing, as the kernel's does for a range it rounds away.
    pub fn collapse_does_nothing(&self, is_so: bool) {
        self.state().collapse_does_nothing = is_so;
    }

    /// From now on `MADV_COLD` says yes and splits nothing, as the kernel does for a page that is shared or pinned.
    pub fn cold_does_nothing(&self, is_so: bool) {
        self.state().cold_does_nothing = is_so;
    }

    /// How many calls there were.
    pub fn calls(&self) -> u64 {
        self.state().calls.made()
    }

    /// How many windows are one huge page.
    pub fn huge_windows(&self) -> u64 {
        self.state().pages.values().filter(|is_huge| **is_huge).count() as u64 * PAGE / WINDOW
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().expect("no test panics while it holds the fake host")
    }

    fn enter(&self, what: &'static str) -> Result<std::sync::MutexGuard<'_, State>, HostError> {
        let mut state = self.state();
        state.calls.enter().map_err(|source| HostError { what, source })?;
        Ok(state)
    }
}

fn pages(start: Hva, bytes: Bytes) -> impl Iterator<Item = u64> {
    (start.get()..start.get() + bytes.get()).step_by(PAGE as usize)
}

fn windows(start: Hva, bytes: Bytes) -> impl Iterator<Item = u64> {
    (start.get()..start.get() + bytes.get()).step_by(WINDOW as usize)
}

impl State {
    fn collapse(&mut self, start: u64) -> Result<(), i32> {
        let is_hole = self.pages.range(start..start + WINDOW).next().is_none();
        if is_hole || self.no_huge.contains(&start) {
            return Err(libc::EINVAL);
        }
        if !self.collapse_does_nothing {
            self.pages.extend(pages(Hva::new(start), PageSize::Huge2M.bytes()).map(|page| (page, true)));
        }
        Ok(())
    }

    /// The huge page that holds `at` becomes base pages.
    fn split(&mut self, at: u64) {
        let window = at - at % WINDOW;
        if !self.cold_does_nothing {
            self.pages.range_mut(window..window + WINDOW).for_each(|(_, is_huge)| *is_huge = false);
        }
    }
}

impl Host for FakeHost {
    fn now(&self) -> Moment {
        Moment::after_start(self.state().now)
    }

    fn thread_cpu_time(&self) -> Duration {
        self.state().now
    }

    fn advise(&self, start: Hva, bytes: Bytes, advice: Advice) -> Result<(), HostError> {
        const WHAT: &str = "fake madvise";
        let fail = |errno| Err(HostError { what: WHAT, source: io::Error::from_raw_os_error(errno) });
        let mut state = self.enter(WHAT)?;
        if let Some((_, errno, times)) = state.fail_advice.iter_mut().find(|(of, _, times)| *of == advice && *times > 0)
        {
            *times -= 1;
            return fail(*errno);
        }
        for window in windows(start, bytes) {
            match advice {
                Advice::HugePage => {
                    state.no_huge.remove(&window);
                    state.huge.insert(window);
                }
                Advice::NoHugePage => {
                    state.huge.remove(&window);
                    state.no_huge.insert(window);
                }
                Advice::Collapse => {
                    state.now += COLLAPSE_TIME;
                    if let Err(errno) = state.collapse(window) {
                        return fail(errno);
                    }
                }
                Advice::PopulateWrite => {
                    let is_huge = state.huge.contains(&window);
                    let absent: Vec<u64> = pages(Hva::new(window), PageSize::Huge2M.bytes())
                        .filter(|page| !state.pages.contains_key(page))
                        .collect();
                    state.pages.extend(absent.into_iter().map(|page| (page, is_huge)));
                }
                Advice::Cold => state.split(window),
            }
        }
        Ok(())
    }

    fn scan(&self, start: Hva, bytes: Bytes, runs: &mut Vec<PageRun>) -> Result<(), HostError> {
        let state = self.enter("fake scan")?;
        for (page, is_huge) in state.pages.range(start.get()..start.get() + bytes.get()) {
            match runs.last_mut() {
                Some(run) if (run.start + run.bytes).get() == *page && run.is_huge == *is_huge => {
                    run.bytes += PageSize::Base4K.bytes();
                }
                _ => runs.push(PageRun { start: Hva::new(*page), bytes: PageSize::Base4K.bytes(), is_huge: *is_huge }),
            }
        }
        Ok(())
    }

    fn read_text(&self, path: &str) -> Result<String, HostError> {
        drop(self.enter("fake read")?);
        Err(HostError { what: "fake read", source: io::Error::new(io::ErrorKind::NotFound, path.to_owned()) })
    }

    fn sleep(&self, time: Duration) {
        self.state().now += time;
    }
}
