//! Shared part of the fakes: calls are counted, and one of them can be made to fail or to panic.

use std::io;

/// Counts calls; makes a chosen one fail, and another one panic.
#[derive(Debug, Default)]
pub(crate) struct FakeCalls {
    made: u64,
    failing: Option<(u64, i32)>,
    panicking: Option<u64>,
}

impl FakeCalls {
    /// Number of calls so far.
    pub(crate) fn made(&self) -> u64 {
        self.made
    }

    /// Makes the `call`-th call from now on (the next is 0) fail with `errno`, once.
    pub(crate) fn fail(&mut self, call: u64, errno: i32) {
        self.failing = Some((self.made + call, errno));
    }

    /// Makes the `call`-th call from now on (the next is 0) panic, once, before it has changed anything.
    pub(crate) fn panic(&mut self, call: u64) {
        self.panicking = Some(self.made + call);
    }

    /// Counts a call, and returns the failure chosen for it.
    pub(crate) fn enter(&mut self) -> io::Result<()> {
        let call = self.made;
        self.made += 1;
        assert!(self.panicking.take_if(|number| *number == call).is_none(), "as by a defect of wideleaf");
        match self.failing {
            Some((number, errno)) if number == call => {
                self.failing = None;
                Err(io::Error::from_raw_os_error(errno))
            }
            _ => Ok(()),
        }
    }
}
