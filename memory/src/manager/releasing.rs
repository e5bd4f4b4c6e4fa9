//! The area where the zero pages of one VM are kept before they go back to the host. It is opened at the first
//! release, since few policies plan any, and then kept. A host that cannot move pages releases none, and the report
//! gives the reason once.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use wideleaf_policies::{OutcomeResult, Refusal, Skip, VmId};

use crate::detached::{Aside, WindowMover};
use crate::kernel::Kernel;
use crate::mover::linux::MoverError;
use crate::region::GuestRam;
use crate::sys::userfaultfd::UserfaultfdError;

/// State for the releases of one VM; see the module.
pub(super) struct Releasing {
    host: Arc<dyn Kernel>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    mover: Option<WindowMover>,
    /// Why the mover could not start, until the report takes it.
    untold: Option<String>,
    is_told: bool,
}

impl Releasing {
    /// Opens nothing yet.
    pub fn new(host: Arc<dyn Kernel>) -> Releasing {
        Releasing { host, state: Mutex::default() }
    }

    /// The area where this VM's pages are taken aside. Its RAM is anonymous.
    ///
    /// # Errors
    /// The result of the release where pages cannot be moved.
    pub fn aside(&self, ram: &Arc<GuestRam>) -> Result<Arc<Aside>, OutcomeResult> {
        let mut state = self.state();
        if let Some(mover) = &state.mover {
            return Ok(mover.aside().clone());
        }
        match WindowMover::start(self.host.clone(), ram.clone()) {
            Ok(mover) => Ok(state.mover.insert(mover).aside().clone()),
            Err(error) => {
                if !std::mem::replace(&mut state.is_told, true) {
                    state.untold = Some(error.to_string());
                }
                Err(result(&error))
            }
        }
    }

    /// The report's line with the reason why nothing is released, at the first call only.
    pub fn take_untold(&self, vm: VmId) -> Option<String> {
        let why = self.state().untold.take()?;
        Some(format!("{vm}: zero pages are not released: {why}"))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every change is one assignment, so the state is consistent after a panic elsewhere.
        self.state.lock()
    }
}

fn result(error: &MoverError) -> OutcomeResult {
    match error {
        MoverError::NotAnonymous(_)
        | MoverError::Userfaultfd(
            UserfaultfdError::NotSupported | UserfaultfdError::NoMove | UserfaultfdError::NoMinor,
        ) => OutcomeResult::Skipped(Skip::NoMechanism),
        MoverError::Userfaultfd(UserfaultfdError::NotPermitted { .. }) => OutcomeResult::Refused(Refusal::NotPermitted),
        MoverError::Userfaultfd(UserfaultfdError::Call { source, .. }) => {
            OutcomeResult::Refused(Refusal::Other(source.raw_os_error().unwrap_or(0)))
        }
        MoverError::Area(_) => OutcomeResult::Refused(Refusal::Other(libc::ENOMEM)),
        MoverError::Host(error) => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backing::{BackingConfig, BackingKind};
    use crate::testing::fake_host::FakeHost;
    use wideleaf_policies::units::mib;
    use wideleaf_policies::{Gpa, GpaRange, PageSize};

    #[test]
    fn a_host_that_cannot_move_pages_releases_none_and_says_why_once() {
        // Memfd RAM stands for a kernel without UFFDIO_MOVE: the mover refuses both before it changes anything.
        let backing = BackingConfig::new(BackingKind::Memfd, PageSize::Base4K).expect("exists");
        let ram = GuestRam::map(&[GpaRange::new(Gpa::new(0), mib(2)).expect("fits")], backing).expect("memory");
        let releasing = Releasing::new(Arc::<FakeHost>::default());
        for told in [Some("vm 3: zero pages are not released: "), None] {
            let refused = releasing.aside(&ram).expect_err("it cannot be moved");
            assert_eq!(refused, OutcomeResult::Skipped(Skip::NoMechanism));
            let line = releasing.take_untold(VmId(3));
            assert_eq!(line.is_some(), told.is_some());
            assert!(line.iter().zip(told).all(|(line, told)| line.starts_with(told)), "{line:?}");
        }
    }

    #[test]
    fn a_release_is_not_retried_on_a_kernel_without_the_call() {
        let of = |error| result(&MoverError::Userfaultfd(error));
        assert_eq!(of(UserfaultfdError::NoMove), OutcomeResult::Skipped(Skip::NoMechanism));
        let device = std::io::Error::from_raw_os_error(libc::EACCES);
        assert_eq!(of(UserfaultfdError::NotPermitted { device }), OutcomeResult::Refused(Refusal::NotPermitted));
    }
}
