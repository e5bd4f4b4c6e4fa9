//! Streams of accesses, deterministic by their seed: what kernels do to memory, without the kernels.

/// An access to one 64-byte line, and how often it is repeated before another line comes: what a trace holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Bytes from the start of the arena.
    pub address: u64,
    /// A store.
    pub is_write: bool,
    /// How often, in all: at least 1.
    pub repeats: u32,
}

impl Access {
    /// One load.
    pub const fn load(address: u64) -> Access {
        Access { address, is_write: false, repeats: 1 }
    }

    /// One store.
    pub const fn store(address: u64) -> Access {
        Access { address, is_write: true, repeats: 1 }
    }
}
