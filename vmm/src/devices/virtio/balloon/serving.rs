//! The service of the balloon's queues, on its own thread.
//!
//! ```text
//!   inside the gate        outside                                   inside again
//!   page numbers, runs ──▶ the book, and what can be released ─────▶ the buffer is handed back
//!   statistics ──────────▶ kept; the buffer too, until a request for new ones
//! ```
//!
//! The middle part runs outside the gate, so that a pause of the VM does not wait for memory being freed. A
//! reported page is free until its buffer is handed back.

use std::io::Read as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use event_manager::{EventOps, Events, MutEventSubscriber};
use virtio_queue::QueueT as _;
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::eventfd::EventFd;
use wideleaf_memory::actuators::give_back::GiveBack;
use wideleaf_policies::{Bytes, Gpa, GpaRange, PageSize};

use super::statistics::{BUFFER_BYTES_MAX, GuestStatistics};
use super::{BalloonHandle, QUEUE_SIZES};
use crate::devices::virtio::queue::Chain;
use crate::devices::virtio::{ActiveQueue, BrokenQueue, Interrupt};
use crate::dma::DeviceMemory;

/// Number of chains served before another queue has its turn.
const CHAINS_AT_ONCE: usize = 16;

/// Largest number of page numbers in a chain: 16 times what Linux gives. A driver that exceeds it breaks the
/// device, so that no number is silently ignored.
const PAGES_MAX: usize = 4096;

/// Largest amount of memory in a report, in bytes: eight times what Linux gives, 32 runs of 4 MiB. The rest stays
/// with the guest.
const REPORT_BYTES_MAX: u64 = 1 << 30;

/// Largest number of runs in a report: the size of the queue's table. An indirect table, which is not offered but
/// can be used all the same, may have 65535. Each run costs system calls, and a reset waits for them.
const REPORT_RUNS_MAX: usize = QUEUE_SIZES[3] as usize;

/// The queues, by purpose.
pub(super) struct Queues {
    pub inflate: ActiveQueue,
    pub deflate: ActiveQueue,
    pub statistics: Option<StatisticsQueue>,
    pub reports: Option<ActiveQueue>,
}

/// The queue of statistics, and the buffer that waits for the next request.
pub(super) struct StatisticsQueue {
    pub queue: ActiveQueue,
    pub held: Option<u16>,
}

/// The balloon's thread: see the module.
pub(super) struct Serving {
    pub queues: Queues,
    /// Event that requests new statistics.
    pub ask: EventFd,
    pub memory: DeviceMemory,
    pub interrupt: Arc<Interrupt>,
    pub give_back: GiveBack,
    /// Whether the driver announces its next use of a balloon page.
    pub tells: bool,
    pub handle: BalloonHandle,
}

/// The reasons why the device cannot continue.
#[derive(Debug, thiserror::Error)]
enum ServingError {
    #[error(transparent)]
    Queue(#[from] BrokenQueue),
    #[error("the driver put more than {PAGES_MAX} page numbers into one buffer")]
    TooManyPages,
}

/// Numbers of the thread's events.
mod event {
    pub const INFLATE: u32 = 0;
    pub const DEFLATE: u32 = 1;
    pub const STATISTICS: u32 = 2;
    pub const REPORTS: u32 = 3;
    pub const ASK: u32 = 4;
}

impl MutEventSubscriber for Serving {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        for (number, event) in self.events() {
            if let Err(error) = ops.add(Events::with_data(event, number, EventSet::IN)) {
                tracing::error!(%error, "the balloon cannot wait for its driver");
                return self.interrupt.needs_reset();
            }
        }
    }

    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        if let Err(error) = self.serve(events.data()) {
            self.interrupt.broken(&"the balloon", &error);
            for (number, event) in self.events() {
                let _ = ops.remove(Events::with_data(event, number, EventSet::IN));
            }
        }
    }
}

impl Serving {
    fn events(&self) -> Vec<(u32, &EventFd)> {
        let Queues { inflate, deflate, statistics, reports } = &self.queues;
        let mut events =
            vec![(event::INFLATE, &*inflate.kick), (event::DEFLATE, &*deflate.kick), (event::ASK, &self.ask)];
        events.extend(statistics.iter().map(|of| (event::STATISTICS, &*of.queue.kick)));
        events.extend(reports.iter().map(|queue| (event::REPORTS, &*queue.kick)));
        events
    }

    fn serve(&mut self, number: u32) -> Result<(), ServingError> {
        let Serving { queues, ask, memory, interrupt, give_back, tells, handle, .. } = self;
        let chains = ChainServer { memory, interrupt };
        let malformed = &handle.counters().chains_malformed;
        let requests = &handle.counters().requests;
        match number {
            event::INFLATE => chains.serve(
                &mut queues.inflate,
                requests,
                |chain| page_numbers(&chain, malformed),
                |pages| {
                    let pages = pages.ok_or(ServingError::TooManyPages)?;
                    match tells {
                        true => give_back.inflate(pages),
                        false => runs(pages).into_iter().for_each(|run| give_back.report(run)),
                    }
                    Ok(())
                },
            ),
            event::DEFLATE => chains.serve(
                &mut queues.deflate,
                requests,
                |chain| page_numbers(&chain, malformed),
                |pages| {
                    give_back.deflate(pages.ok_or(ServingError::TooManyPages)?);
                    Ok(())
                },
            ),
            event::REPORTS => {
                let Some(queue) = &mut queues.reports else { return Ok(()) };
                let cut = &handle.counters().reports_cut;
                chains.serve(
                    queue,
                    requests,
                    |chain| free_runs(&chain, malformed, cut),
                    |runs| {
                        runs.into_iter().for_each(|run| give_back.report(run));
                        Ok(())
                    },
                )
            }
            event::STATISTICS | event::ASK => {
                if number == event::ASK {
                    let _ = ask.read();
                }
                chains.serve_statistics(queues.statistics.as_mut(), handle, number == event::ASK)
            }
            _ => Ok(()),
        }
    }
}

/// Takes chains of a queue, inside the gate, and hands them back.
struct ChainServer<'a> {
    memory: &'a DeviceMemory,
    interrupt: &'a Interrupt,
}

impl ChainServer<'_> {
    /// Serves some chains: runs `read` inside the gate and `done` outside, and then hands the buffer back.
    fn serve<T>(
        &self,
        queue: &mut ActiveQueue,
        requests: &AtomicU64,
        read: impl Fn(Chain<'_>) -> T,
        done: impl Fn(T) -> Result<(), ServingError>,
    ) -> Result<(), ServingError> {
        let _ = queue.kick.read();
        for _ in 0..CHAINS_AT_ONCE {
            let Some((head, found)) = queue.take(self.memory, &read)? else {
                if !queue.queue.enable_notification(&*self.memory.access()).map_err(BrokenQueue)? {
                    return Ok(());
                }
                continue;
            };
            requests.fetch_add(1, Ordering::Relaxed);
            done(found)?;
            queue.complete(self.memory, self.interrupt, head, 0)?;
        }
        // Schedules the rest after the other queues had their turn.
        let _ = queue.kick.write(1);
        Ok(())
    }

    /// Serves the statistics queue: the driver puts one buffer into it, and the next when it has this one back.
    fn serve_statistics(
        &self,
        queue: Option<&mut StatisticsQueue>,
        handle: &BalloonHandle,
        is_asked: bool,
    ) -> Result<(), ServingError> {
        let Some(StatisticsQueue { queue, held }) = queue else { return Ok(()) };
        let _ = queue.kick.read();
        for _ in 0..CHAINS_AT_ONCE {
            let Some((head, buffer)) = queue.take(self.memory, |chain| statistics(&chain, handle))? else {
                break;
            };
            handle.guest_says(GuestStatistics::parse(&buffer));
            // A second buffer beside the first, which no driver should add, sends the first one back.
            if let Some(before) = held.replace(head) {
                queue.complete(self.memory, self.interrupt, before, 0)?;
            }
        }
        if let Some(head) = held.take_if(|_| is_asked) {
            queue.complete(self.memory, self.interrupt, head, 0)?;
        }
        if queue.queue.enable_notification(&*self.memory.access()).map_err(BrokenQueue)? {
            let _ = queue.kick.write(1);
        }
        Ok(())
    }
}

fn read_at_most(chain: &Chain<'_>, most: usize, malformed: &AtomicU64) -> Vec<u8> {
    let bytes = chain.clone().reader(chain.memory()).ok().and_then(|reader| {
        let mut bytes = Vec::new();
        reader.take(most as u64).read_to_end(&mut bytes).ok().map(|_| bytes)
    });
    bytes.unwrap_or_else(|| {
        malformed.fetch_add(1, Ordering::Relaxed);
        Vec::new()
    })
}

/// The addresses of the pages that a chain names by 32-bit numbers; `None` where there are too many.
fn page_numbers(chain: &Chain<'_>, malformed: &AtomicU64) -> Option<Vec<Gpa>> {
    const NUMBER_BYTES: usize = size_of::<u32>();
    let bytes = read_at_most(chain, (PAGES_MAX + 1) * NUMBER_BYTES, malformed);
    let (numbers, _) = bytes.as_chunks::<NUMBER_BYTES>();
    let address =
        |number: &[u8; NUMBER_BYTES]| Gpa::new(u64::from(u32::from_le_bytes(*number)) * PageSize::Base4K.bytes().get());
    (numbers.len() <= PAGES_MAX).then(|| numbers.iter().map(address).collect())
}

fn statistics(chain: &Chain<'_>, handle: &BalloonHandle) -> Vec<u8> {
    read_at_most(chain, BUFFER_BYTES_MAX, &handle.counters().chains_malformed)
}

/// The whole pages of a report's buffers that the device could write.
fn free_runs(chain: &Chain<'_>, malformed: &AtomicU64, cut: &AtomicU64) -> Vec<GpaRange> {
    let (mut runs, mut left) = (Vec::new(), REPORT_BYTES_MAX);
    for (number, descriptor) in chain.clone().enumerate() {
        let bytes = u64::from(descriptor.len());
        if number >= REPORT_RUNS_MAX || bytes > left {
            cut.fetch_add(1, Ordering::Relaxed);
            break;
        }
        if !descriptor.is_write_only() {
            malformed.fetch_add(1, Ordering::Relaxed);
            continue;
        }
        left -= bytes;
        let page = PageSize::Base4K.bytes().get();
        let start = descriptor.addr().0.checked_next_multiple_of(page);
        let end = descriptor.addr().0.checked_add(bytes).map(|end| end / page * page);
        let run = start.zip(end).filter(|(start, end)| start < end);
        runs.extend(run.and_then(|(start, end)| GpaRange::new(Gpa::new(start), Bytes::new(end - start))));
    }
    runs
}

/// Joins neighbouring pages: a single page is a piece of its window, all of its pages are the window.
fn runs(mut pages: Vec<Gpa>) -> Vec<GpaRange> {
    pages.sort_unstable();
    pages.dedup();
    let page = PageSize::Base4K.bytes();
    let of_run = |run: &[Gpa]| GpaRange::new(run[0], page * run.len() as u64);
    pages.chunk_by(|a, b| *a + page == *b).filter_map(of_run).collect()
}
