//! The memory a kernel works on: a block of 64-bit words that belongs to the kernel alone, lent out in one of two
//! ways.
//!
//! ```text
//!                 ┌─ words(): all of it as atomic words, to any number of vCPUs at once (gups, pattern, phases)
//!   Arena, unused ┤
//!                 └─ typed(): exclusive slices of f64, u32, …, once (npb.*)
//!
//!   arena  │ big array          │ gap │ big array    │ small │ small │ … free
//!          ▲ 2 MiB border             ▲ 2 MiB border
//! ```
//!
//! Relaxed moves of atomic words do not vectorise, and a stencil of floating-point numbers should. The first call
//! settles which of the two ways is used. Using both would be a data race between a word and a number at one
//! address.
#![expect(unsafe_code, reason = "turns an address range, which is all a guest has, into slices with a lifetime")]

use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
use core::marker::PhantomData;
use core::ptr;
use core::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

/// Prefetches the cache line `bytes` behind `from`, for a stream that reaches it soon. It is only a hint: nothing
/// is read, and beyond the end of the stream it has no effect.
pub fn prefetch_behind<T>(from: &T, bytes: usize) {
    let address = ptr::from_ref(from).cast::<i8>().wrapping_add(bytes);
    // SAFETY: a prefetch faults at no address and changes nothing that a program sees (SDM volume 2, PREFETCHh); SSE,
    // which brought it, is part of x86-64.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(address) }
}

/// Exclusive memory. It is not `Clone`: the owner of the arena owns the memory.
///
/// The initial contents are not specified; kernels write before they read.
#[derive(Debug)]
pub struct Arena<'m> {
    memory: &'m [AtomicU64],
    /// `UNUSED`, `WORDS` or `TYPED`.
    lent_as: AtomicU8,
}

const UNUSED: u8 = 0;
const WORDS: u8 = 1;
const TYPED: u8 = 2;

impl<'m> Arena<'m> {
    /// Creates the arena of `bytes / 8` words that begins at `start`.
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
        let memory = unsafe { core::slice::from_raw_parts(start.cast::<AtomicU64>(), bytes / 8) };
        Self { memory, lent_as: AtomicU8::new(UNUSED) }
    }

    /// Creates the arena over these words.
    pub fn from_words(words: &'m mut [u64]) -> Self {
        let bytes = size_of_val(words);
        // SAFETY: a mutable slice is aligned, mapped and exclusive for its lifetime, and no longer than isize::MAX.
        unsafe { Self::from_raw(words.as_mut_ptr(), bytes) }
    }

    /// The whole arena as words, which several vCPUs may read and write at once without undefined behaviour.
    ///
    /// # Panics
    /// Panics if the arena has been lent as typed memory.
    pub fn words(&self) -> &'m [AtomicU64] {
        let before = self.lend_as(WORDS);
        assert!(before != TYPED, "the arena has been lent as typed memory, it has no words any more");
        self.memory
    }

    /// The whole arena as exclusive memory for the slices of a [`Layout`]; `None` if they do not fit. Nothing is
    /// written yet.
    ///
    /// # Panics
    /// Panics if the arena has been lent before, in either way.
    pub fn typed(&self, layout: &Layout) -> Option<Typed<'m>> {
        assert!(layout.start == self.address(), "the layout was made for another arena");
        if layout.needed() > self.bytes() {
            return None;
        }
        let before = self.lend_as(TYPED);
        assert!(before == UNUSED, "typed memory is lent once, and not beside words");
        Some(Typed {
            start: self.memory.as_ptr().cast_mut().cast(),
            bytes: self.bytes(),
            taken: 0,
            memory: PhantomData,
        })
    }

    /// Settles how the arena is lent unless that is settled already. Returns the state before.
    fn lend_as(&self, way: u8) -> u8 {
        match self.lent_as.compare_exchange(UNUSED, way, Ordering::AcqRel, Ordering::Acquire) {
            Ok(before) | Err(before) => before,
        }
    }

    /// Address of the first word: in a guest image, which maps memory one to one, its GPA.
    pub fn address(&self) -> u64 {
        self.memory.as_ptr().addr() as u64
    }

    /// Length in bytes.
    pub const fn bytes(&self) -> u64 {
        self.memory.len() as u64 * 8
    }
}

/// Numbers that typed memory may hold.
///
/// # Safety
/// Every bit pattern is a value, zero bytes are the number 0, there is no padding, and the alignment is at most
/// a cache line, 64 bytes.
pub unsafe trait Number: Copy + Send + Sync + 'static {}
// SAFETY: IEEE 754 numbers have no invalid bits, and zero bytes are +0.0.
unsafe impl Number for f64 {}
// SAFETY: every integer is valid.
unsafe impl Number for u32 {}
// SAFETY: every integer is valid.
unsafe impl Number for u64 {}
// SAFETY: numbers one behind the other, without padding between them, and with the alignment of one.
unsafe impl<T: Number, const N: usize> Number for [T; N] {}

/// Cache line in bytes: a small slice begins at a line border, so that no two slices share a line.
const LINE_BYTES: u64 = 64;
/// A 2 MiB window: a slice of at least this size begins at a window border, so that it shares no backing page with
/// another slice.
const WINDOW_BYTES: u64 = 2 << 20;
/// x86-64 programs address 47 bits; below this limit no sum of a layout's few slices overflows.
const SLICE_BYTES_LIMIT: u64 = 1 << 47;
const _: () = assert!(LINE_BYTES >= align_of::<f64>() as u64 && LINE_BYTES >= align_of::<u64>() as u64);

/// The slices that a kernel needs of an arena, in this order. A layout is made before memory is touched, so that a
/// shortage of memory is found first.
#[derive(Debug)]
pub struct Layout {
    start: u64,
    end: u64,
}

impl Layout {
    /// Creates a layout without slices, for an arena that begins at `start`.
    pub const fn at(start: u64) -> Self {
        Self { start, end: start }
    }

    /// Appends a slice of `count` numbers.
    ///
    /// # Panics
    /// Panics if the slice is longer than any address space.
    pub fn place<T: Number>(&mut self, count: u64) -> Place<T> {
        let border = if bytes_of::<T>(count) >= WINDOW_BYTES { WINDOW_BYTES } else { LINE_BYTES };
        self.place_at_border(count, border)
    }

    /// Appends a slice without an alignment gap, however large the slice, as a compiler lays out the variables of
    /// one block.
    ///
    /// # Panics
    /// Panics if the slice is longer than any address space.
    pub fn place_behind<T: Number>(&mut self, count: u64) -> Place<T> {
        self.place_at_border(count, LINE_BYTES)
    }

    fn place_at_border<T: Number>(&mut self, count: u64, border: u64) -> Place<T> {
        let bytes = bytes_of::<T>(count);
        let address = self.end.next_multiple_of(border);
        self.end = address + bytes;
        Place { offset: address - self.start, count, number: PhantomData }
    }

    /// Bytes from the arena's beginning to the end of the last slice.
    pub const fn needed(&self) -> u64 {
        self.end - self.start
    }
}

fn bytes_of<T: Number>(count: u64) -> u64 {
    let bytes = count.checked_mul(size_of::<T>() as u64).filter(|bytes| *bytes < SLICE_BYTES_LIMIT);
    bytes.expect("a slice is shorter than the address space")
}

/// Place of a slice in the arena.
#[derive(Debug)]
pub struct Place<T> {
    offset: u64,
    count: u64,
    number: PhantomData<T>,
}

/// Exclusive memory from which slices are taken from the front to the back.
#[derive(Debug)]
pub struct Typed<'m> {
    start: *mut u8,
    bytes: u64,
    /// Offset below which all memory has been given away.
    taken: u64,
    memory: PhantomData<&'m mut [u64]>,
}

impl<'m> Typed<'m> {
    /// Takes the slice at `place`, zeroed.
    ///
    /// # Panics
    /// Panics if a slice behind it has been taken before, or if `place` comes from the layout of a larger arena.
    pub fn take<T: Number>(&mut self, place: Place<T>) -> &'m mut [T] {
        let end = place.offset + place.count * size_of::<T>() as u64;
        assert!(self.taken <= place.offset && end <= self.bytes, "slices are taken in the order of the layout");
        self.taken = end;
        let start = self.start.wrapping_add(place.offset as usize).cast::<T>();
        assert!(start.is_aligned(), "the layout was made for another arena");
        // SAFETY: `[offset, end)` is inside the arena, which is mapped and exclusive (`lent_as` lets neither words
        // nor a second `Typed` exist beside this one), and aligned; zero bytes are a number.
        unsafe { start.write_bytes(0, place.count as usize) };
        // SAFETY: as above and initialised; `taken` only grows, so no other slice overlaps this one; the arena came
        // from atomics, which may be written through a shared reference.
        unsafe { core::slice::from_raw_parts_mut(start, place.count as usize) }
    }
}

/// An exclusive slice as atomics, for vCPUs that write to disjoint places that the compiler cannot check.
pub fn as_atomics(numbers: &mut [u32]) -> &[AtomicU32] {
    let (start, count) = (numbers.as_mut_ptr().cast::<AtomicU32>(), numbers.len());
    // SAFETY: AtomicU32 has the size, alignment and bit validity of u32, and the slice is exclusive for the borrow.
    unsafe { core::slice::from_raw_parts(start, count) }
}

#[cfg(test)]
mod tests {
    use std::vec;

    use super::*;

    #[test]
    fn slices_are_zeroed_and_disjoint_and_large_ones_begin_at_a_window() {
        let mut words = vec![u64::MAX; 1 << 20];
        let arena = Arena::from_words(&mut words);
        let mut layout = Layout::at(arena.address());
        let (small, large) = (layout.place::<u32>(3), layout.place::<f64>(1 << 18));
        let mut typed = arena.typed(&layout).expect("8 MiB hold 2 MiB, 12 bytes and a gap");
        let (small, large) = (typed.take(small), typed.take(large));
        assert!(small.iter().all(|number| *number == 0) && large.iter().all(|number| *number == 0.0));
        assert_eq!(large.as_ptr().addr() as u64 % WINDOW_BYTES, 0);
        assert!(small.as_ptr_range().end.addr() <= large.as_ptr().addr());
    }

    #[test]
    fn a_layout_that_does_not_fit_is_refused_before_any_write() {
        let mut words = vec![7; 8];
        let arena = Arena::from_words(&mut words);
        let mut layout = Layout::at(arena.address());
        layout.place::<u64>(100);
        assert!(arena.typed(&layout).is_none());
        assert!(arena.words().iter().all(|word| word.load(Ordering::Relaxed) == 7));
    }

    #[test]
    #[should_panic(expected = "lent once")]
    fn typed_memory_is_not_lent_beside_words() {
        let mut words = [0; 8];
        let arena = Arena::from_words(&mut words);
        let _words = arena.words();
        arena.typed(&Layout::at(arena.address()));
    }

    #[test]
    #[should_panic(expected = "no words any more")]
    fn words_are_not_lent_beside_typed_memory() {
        let mut words = [0; 8];
        let arena = Arena::from_words(&mut words);
        let _typed = arena.typed(&Layout::at(arena.address()));
        arena.words();
    }

    #[test]
    #[should_panic(expected = "in the order of the layout")]
    fn no_place_is_taken_twice_by_a_second_layout() {
        let mut words = [0; 64];
        let arena = Arena::from_words(&mut words);
        let (mut one, mut other) = (Layout::at(arena.address()), Layout::at(arena.address()));
        let (first, again) = (one.place::<u64>(8), other.place::<u64>(8));
        let mut typed = arena.typed(&one).expect("the arena has 64 words");
        typed.take(first);
        typed.take(again);
    }
}
