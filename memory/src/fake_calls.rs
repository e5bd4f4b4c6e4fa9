//! What the fakes share: calls are counted, and one of them can be made to fail or to panic.

use std::io;

/// Counts calls; fails the one it was told to, and panics in another.
#[derive(Debug, Default)]
pub(crate) struct FakeCalls {
    made: u64,
    failing: Option<(u64, i32)>,
    panicking: Option<u64>,
}

impl FakeCalls {
    /// How many calls there were.
    pub(crate) fn made(&self) -> u64 {
        self.made
    }

    /// The `call`-th call from now on (the next is 0) fails with `errno`, once.
    pub(crate) fn fail(&mut self, call: u64, errno: i32) {
        self.failing = Some((self.made + call, errno));
    }

    /// The `call`-th call from now on (the next is 0) panics, once, before it has changed anything.
    pub(crate) fn panic(&mut self, call: u64) {
        self.panicking = Some(self.made + call);
    }

    /// A call: the failure that was asked for, or nothing.
    pub(crate) fn enter(&mut self) -> io::Result<()> {
        let call = self.made;
        self.made += 1;
        assert!(self.panicking.take_if(|number| *number == call).is_none(), "as by a mistake of ours");
        match self.failing {
            Some((number, errno)) if number == call => {
                self.failing = None;
                Err(io::Error::from_raw_os_error(errno))
            }
            _ => Ok(()),
        }
    }
}
