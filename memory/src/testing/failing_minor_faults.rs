//! A wrapper of minor faults in which calls fail at random, as [`crate::testing::fault_injection`] decides.

use std::ops::Range;
use std::sync::Arc;

use wideleaf_policies::WindowIndex;

use crate::host::HostError;
use crate::sensors::minor_faults::MinorFaults;
use crate::testing::fault_injection::{Fate, FaultInjection};

/// Wraps minor faults; see the module.
pub struct FailingMinorFaults {
    real: Arc<dyn MinorFaults>,
    faults: Arc<FaultInjection>,
}

impl FailingMinorFaults {
    /// `faults` decides which calls to `real` fail.
    pub fn new(real: Arc<dyn MinorFaults>, faults: Arc<FaultInjection>) -> FailingMinorFaults {
        FailingMinorFaults { real, faults }
    }

    fn refuse(&self, what: &'static str, errnos: &[i32]) -> Result<(), HostError> {
        self.faults.refuse(what, errnos).map_err(|source| HostError { what, source })
    }
}

impl MinorFaults for FailingMinorFaults {
    fn watch(&self, window: WindowIndex) -> Result<(), HostError> {
        self.refuse("watch", &[libc::EBUSY, libc::ENOMEM])?;
        self.real.watch(window)
    }

    fn unwatch(&self, window: WindowIndex) -> Result<(), HostError> {
        self.refuse("unwatch", &[libc::ENOMEM])?;
        self.real.unwatch(window)
    }

    /// A late failure has unmapped the pages: madvise(2) may have done a part of its work.
    fn unmap(&self, window: WindowIndex, pages: Range<u16>) -> Result<(), HostError> {
        let what = "unmap";
        let source = match self.faults.fate(what, &[libc::EAGAIN]) {
            Fate::Fine => return self.real.unmap(window, pages),
            Fate::Early(error) => error,
            Fate::Late(error) => {
                self.real.unmap(window, pages)?;
                error
            }
        };
        Err(HostError { what, source })
    }

    fn map_from_file(&self, window: WindowIndex) -> Result<(), HostError> {
        self.refuse("map_from_file", &[libc::EAGAIN, libc::ENOMEM])?;
        self.real.map_from_file(window)
    }

    /// A late failure has read its messages, as the real one has after a message it does not know. An interrupted
    /// read is not an error of the real one: no thread waited then.
    fn read_touches(&self, touches: &mut Vec<WindowIndex>) -> Result<(), HostError> {
        let what = "read_touches";
        let source = match self.faults.fate(what, &[libc::ENOMEM]) {
            Fate::Fine => return self.real.read_touches(touches),
            Fate::Early(error) => error,
            Fate::Late(error) => {
                self.real.read_touches(touches)?;
                error
            }
        };
        Err(HostError { what, source })
    }
}
