//! What both fakes share: calls are counted, and one of them can be made to fail.

use std::io;

/// Counts calls and fails the one it was told to.
#[derive(Debug, Default)]
pub(crate) struct FakeCalls {
    made: u64,
    failing: Option<(u64, i32)>,
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

    /// A call: the failure that was asked for, or nothing.
    pub(crate) fn enter(&mut self) -> io::Result<()> {
        let call = self.made;
        self.made += 1;
        match self.failing {
            Some((number, errno)) if number == call => {
                self.failing = None;
                Err(io::Error::from_raw_os_error(errno))
            }
            _ => Ok(()),
        }
    }
}
