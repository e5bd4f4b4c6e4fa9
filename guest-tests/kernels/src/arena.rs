//! The memory a kernel works on: a block of 64-bit words that nobody else touches.
#![expect(unsafe_code, reason = "turns an address range, which is all a guest has, into words with a lifetime")]

use core::sync::atomic::AtomicU64;

/// Exclusive memory, seen as atomic words so that several vCPUs may read and write them at once without undefined
/// behaviour. It is not `Clone`: whoever has the arena has the memory.
///
/// What is in it at first is not specified; kernels write before they read.
#[derive(Debug)]
pub struct Arena<'m> {
    words: &'m [AtomicU64],
}

impl<'m> Arena<'m> {
    /// The arena of `bytes / 8` words that begins at `start`.
    ///
    /// # Safety
    /// - `start` is not null and 8-byte aligned, and `[start, start + bytes)` is mapped, readable and writable, for all
    ///   of `'m`.
    /// - For all of `'m` nothing in this program reads or writes the range but through this arena. What happens beneath
    ///   the program's addresses (a host that moves the pages) does not count.
    /// - `bytes` is at most `isize::MAX`.
    pub unsafe fn from_raw(start: *mut u64, bytes: usize) -> Self {
        assert!(start.is_aligned() && !start.is_null(), "an arena begins at an aligned address that is not 0");
        // SAFETY: the caller vouches for mapping, lifetime, exclusivity and length; AtomicU64 has the size, alignment
        // and bit validity of u64; any contents are valid words.
        Self { words: unsafe { core::slice::from_raw_parts(start.cast::<AtomicU64>(), bytes / 8) } }
    }

    /// The arena made of these words.
    pub fn from_words(words: &'m mut [u64]) -> Self {
        let bytes = size_of_val(words);
        // SAFETY: a mutable slice is aligned, mapped and exclusive for its lifetime, and no longer than isize::MAX.
        unsafe { Self::from_raw(words.as_mut_ptr(), bytes) }
    }

    /// The arena made of words somebody else owns, and leaves alone for `'m`.
    pub const fn from_shared_words(words: &'m [AtomicU64]) -> Self {
        Self { words }
    }

    /// All words.
    pub const fn words(&self) -> &'m [AtomicU64] {
        self.words
    }

    /// Address of the first word: the GPA in a guest image, which maps memory one to one.
    pub fn address(&self) -> u64 {
        self.words.as_ptr().addr() as u64
    }

    /// Length in bytes.
    pub const fn bytes(&self) -> u64 {
        self.words.len() as u64 * 8
    }
}
