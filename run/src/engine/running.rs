//! A run while its guest or kernel runs, until that has ended.

use std::sync::Arc;

use wideleaf_attach::numa::of_live as nodes_of_live;

use super::Prepared;
use super::over::Over;
use crate::devices::WatchedDevices;
use crate::environment::Environment;
use crate::failure::Failure;
use crate::front_end::GuestConsole;
use crate::guarantee::WatchedGuarantee;
use crate::guest::RunningGuest;
use crate::native;
use crate::outcome::Ended;
use crate::policy_switch::PolicySwitch;
use crate::registered::Registered;
use crate::restarts::Restarts;
use crate::sandboxed::Sandboxed;
use crate::save_thread::SavingThread;
use crate::snapshot::restoring::teardown::Teardown;

/// A run with a running guest or native kernel.
pub(super) struct Running<'a> {
    // In the order in which they are given back.
    pub(super) work: Working,
    /// Paging of the guest: `ept`, `npt` or `shadow`; `none` for a native run.
    pub(super) paging: &'static str,
    pub(super) environment: Environment,
    pub(super) sandboxed: Option<Sandboxed>,
    pub(super) watched: Arc<WatchedDevices>,
    pub(super) of: Prepared<'a>,
}

/// The running part.
pub(super) enum Working {
    /// A kernel in threads of this process, which the waiting thread starts.
    Native,
    /// A guest in KVM.
    Guest(Box<GuestWork>),
}

/// Guards of a running guest, in the order in which they are given back.
pub(super) struct GuestWork {
    /// Before the guest: a save under way is cancelled.
    pub(super) saving: Option<Arc<SavingThread>>,
    pub(super) guest: RunningGuest,
    /// Drops the guest, where a part of its RAM may still be lost.
    pub(super) teardown: Option<Teardown<RunningGuest>>,
    pub(super) console: Option<Box<dyn GuestConsole>>,
    pub(super) _registration: Option<Registered>,
    pub(super) policy: Arc<PolicySwitch>,
    pub(super) kept: Option<WatchedGuarantee>,
}

impl<'a> Running<'a> {
    /// Waits for the end of the guest or kernel, the timeout or an interrupt. Afterwards the guest is gone.
    pub(super) fn wait(self) -> Result<Over<'a>, Failure> {
        let Running { of, work, paging, environment, sandboxed, watched } = self;
        let (mut migrated, mut first_entry) = (None, None);
        let (ended, resets, ram_at_end, console_bytes_lost, guarantee) = match work {
            Working::Native => {
                let ended = native::run(of.spec, &of.ram, &of.session, of.interrupts)?;
                (ended, 0, of.session.at_end(), 0, None)
            }
            Working::Guest(work) => {
                let GuestWork { saving, guest, teardown, console, _registration, policy, kept } = *work;
                let restarts = Restarts::new(&of.session, &policy, of.spec.is_prefaulted);
                let (ended, resets) = guest.wait(of.spec.timeout, of.interrupts, restarts);
                migrated = saving.and_then(SavingThread::end);
                let ended = if migrated.is_some() { Ended::Migrated } else { ended };
                of.incoming.iter().for_each(|incoming| incoming.give_up());
                let ram_at_end = of.session.at_end();
                first_entry = guest.machine().control().first_entry();
                of.tear_down(teardown, guest);
                let guarantee = kept.map(|kept| kept.report(ram_at_end.as_ref()));
                (ended, resets, ram_at_end, console.map_or(0, GuestConsole::end), guarantee)
            }
        };
        Ok(Over {
            ended,
            resets,
            migrated,
            first_entry,
            ram_at_end,
            numa: of.session.live().and_then(|live| nodes_of_live(&live)),
            guarantee,
            console_bytes_lost,
            paging,
            environment,
            sandboxed,
            watched,
            of,
        })
    }
}

impl Prepared<'_> {
    /// Drops the guest, unless a part of its RAM is lost: a device may sleep in a touch of RAM that will not come, and
    /// only the end of the process ends it.
    pub(super) fn tear_down(&self, teardown: Option<Teardown<RunningGuest>>, guest: RunningGuest) {
        let has_lost_ram = || {
            self.restoring.as_ref().is_some_and(|restoring| restoring.has_failed())
                || self.incoming.as_ref().is_some_and(|incoming| incoming.has_failed())
        };
        match teardown {
            Some(teardown) => _ = teardown.tear_down(guest, has_lost_ram),
            None => drop(guest),
        }
    }
}
