//! Guest RAM on reserved frames. The first touch of a window reserves 2 MiB of contiguous frames, and each touched
//! page is mapped from them one by one. A window with enough populated pages becomes large in place, without a copy.
//! [`wideleaf_policies::reservations`] decides which window does, and which reservation is broken when the host is
//! short; this module does it (`userfaultfd(2)`, missing and minor faults; `fallocate(2)`).
//!
//! ```text
//!   a thread touches a page that is not mapped, and waits
//!        │
//!        ▼           the file has pages there (touched before the service began), or no memory is available ─────┐
//!   [Untouched] ── fallocate 2 MiB ──▶ [Reserved]  each touched page: UFFDIO_CONTINUE, 4 KiB of the folio        │
//!                                        │     │                                                                 │
//!             the threshold is reached   │     │  the host is short, and it was changed longest ago              │
//!    drop its entries, unregister it,    ▼     ▼  punch holes where nothing was touched                          │
//!    fault it in: one huge entry   [Released] [Released] ◀───────────────────────────────────────────────────────┘
//!                                     │          the kernel's own faults bring base pages from now on; or, if it
//!                                     │          cannot be let go, [Kept]: each touched page is allocated and mapped
//!        pages are given back: demote ▼
//!                                  [Reserved], without these pages       no page is left: [Untouched], from any state
//! ```
//!
//! The kernel supplies the folio: RAM is a file on a tmpfs of its own that has huge folios
//! ([`crate::BackingConfig::reservable`]), whatever `shmem_enabled` is. `fallocate` takes it in 10 us and clears
//! nothing; mapping its first page clears all of it. On an ordinary memfd everything works too, but the frames are
//! scattered, and promotion copies (`by_collapse`).
//!
//! Only this thread maps pages of a reserved window, and a thread that touches another page waits for it. So the
//! guest has never written an unpopulated page, and it can be given back. Other mappings of the file must not exist,
//! except for the moment in which this thread checks whether the kernel supplied a huge folio.
//!
//! Pages that the guest gives back leave their reservation, and a large window that loses some gets base pages again
//! (`giving_back.rs`).
//!
//! No thread may wait for ever. However the service ends, all memory is let go and all waiters are woken; from then
//! on the kernel answers, with reserved frames first.

use std::io;
use std::sync::Arc;

use wideleaf_policies::{Bytes, Gpa, GpaRange, PageSize, PerTenThousand, ReservationRules, Reservations, VmId};

use crate::backing::BackingConfig;
use crate::faults::{Counted, Faults, RegisterError, ServiceThread};
use crate::host::{Advice, Host, linux::LinuxHost};
use crate::region::GuestRam;
use crate::sys::userfaultfd::{Mode, Userfaultfd, UserfaultfdError};

mod frames;
mod giving_back;
mod report;
mod requests;
mod reserving;

pub use report::ReservedFramesReport;
pub(crate) use requests::FramesService;

use frames::{FileFrames, Frames};
use requests::Requests;
use reserving::{LOOK_AT_HOST_EVERY, Reserving, State};

/// The service in its thread. See the module.
#[derive(Debug)]
pub struct ReservedFrames(ServiceThread<ReservedFramesReport>);

/// Why frames cannot be reserved.
#[derive(Debug, thiserror::Error)]
pub enum ReservedFramesError {
    /// The RAM is of another kind.
    #[error(
        "{0}: cannot reserve frames: only memfd RAM on 4k pages, mapped for it, can have them; use --backing memfd \
         --host-page 4k"
    )]
    NotReservable(VmId),
    /// RAM that this process has not mapped, as on a fake host.
    #[error("{0}: cannot register RAM with userfaultfd that is not mapped in this process")]
    NotMapped(VmId),
    /// No userfaultfd is available.
    #[error(transparent)]
    Userfaultfd(#[from] UserfaultfdError),
    /// The kernel refused to pass on a range's faults.
    #[error(transparent)]
    Register(#[from] RegisterError),
    /// No thread could be started, or no pipe made to stop it.
    #[error("cannot start the thread that maps reserved frames: {0}")]
    Thread(#[source] io::Error),
}

impl ReservedFrames {
    /// Registers all RAM of `vms` and starts the thread that serves it from reserved frames, under `rules`.
    ///
    /// # Errors
    /// [`ReservedFramesError`]; nothing stays registered. Needs [reservable](crate::BackingConfig::reservable) RAM
    /// and a userfaultfd that sees kernel faults and minor ones (Linux 5.14).
    pub fn start(
        host: Arc<dyn Host>,
        vms: Vec<(VmId, Arc<GuestRam>)>,
        rules: ReservationRules,
    ) -> Result<ReservedFrames, ReservedFramesError> {
        ReservedFrames::start_with(host, vms, rules, Box::new(FileFrames::default()))
    }

    fn start_with(
        host: Arc<dyn Host>,
        vms: Vec<(VmId, Arc<GuestRam>)>,
        rules: ReservationRules,
        frames: Box<dyn Frames>,
    ) -> Result<ReservedFrames, ReservedFramesError> {
        if let Some((vm, _)) = vms.iter().find(|(_, ram)| !ram.backing().is_reservable()) {
            return Err(ReservedFramesError::NotReservable(*vm));
        }
        let uffd = Userfaultfd::open_for_minor_faults()?;
        let counted = Counted::default();
        let service = Reserving {
            faults: Faults::register(uffd, &vms, Mode::MissingOrMinor, State::Untouched)?,
            book: Reservations::new(rules),
            next_look_at_host: host.now() + LOOK_AT_HOST_EVERY,
            not_given_back: Bytes::ZERO,
            counted: counted.clone(),
            host: host.clone(),
            frames,
            requests: Requests::new().map_err(ReservedFramesError::Thread)?,
        };
        for (vm, ram) in &vms {
            ram.set_frames_service(service.requests.way(*vm).map_err(ReservedFramesError::Thread)?);
        }
        let serving = ServiceThread::start("reserved-frames", host, counted, service);
        serving.map(ReservedFrames).map_err(ReservedFramesError::Thread)
    }

    /// Counts so far.
    pub fn report(&self) -> ReservedFramesReport {
        self.0.report()
    }

    /// The counters, readable by others while the service runs and after it.
    pub(crate) fn counted(&self) -> Counted<ReservedFramesReport> {
        self.0.counted()
    }

    /// Lets all memory go, wakes waiting threads, ends the thread, and returns its counts. Reserved frames stay
    /// with the guest.
    pub fn stop(self) -> ReservedFramesReport {
        self.0.stop("the service panicked")
    }
}

/// Whether a window on this host becomes large without a copy: reserves one of its own, and touches it.
///
/// # Errors
/// The reason why it does not.
pub fn probe() -> Result<String, String> {
    let ram = [GpaRange::new(Gpa::new(0), PageSize::Huge2M.bytes()).expect("one window fits")];
    let ram = GuestRam::map(&ram, BackingConfig::reservable()).map_err(|error| error.to_string())?;
    let host = Arc::new(LinuxHost::open().map_err(|error| error.to_string())?);
    let never = PerTenThousand::new(u32::MAX);
    let rules = ReservationRules { threshold: 1, break_from: never, break_to: never };
    let service = ReservedFrames::start(host.clone(), vec![(VmId(0), ram.clone())], rules);
    let service = service.map_err(|error| error.to_string())?;
    let touched = host.advise(ram.base(), PageSize::Base4K.bytes(), Advice::PopulateWrite);
    let report = service.stop();
    touched.map_err(|error| error.to_string())?;
    match report {
        ReservedFramesReport { promoted: 1, by_collapse: 0, .. } => {
            Ok("contiguous frames, mapped as one huge page of 2 MiB".into())
        }
        ReservedFramesReport { promoted: 1, .. } => {
            Err("reserved windows become large by MADV_COLLAPSE (in place: CAP_SYS_ADMIN, Linux 6.14)".into())
        }
        report => Err(format!("a reserved window does not become large: {report:?}")),
    }
}

#[cfg(test)]
mod tests;
