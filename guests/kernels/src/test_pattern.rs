//! Words that encode their own place, and the record of wrong ones.
//!
//! ```text
//!   word i in generation g:  scramble(g·2^40 + i)     never 0, never the same for two (i, g)
//! ```
//!
//! A host that moves, splits or merges the pages beneath a running guest must not lose a byte. A dropped page reads
//! as zeros, one copied too early as the previous generation, one at the wrong place as another word's value, and a
//! window combined from both as a mixture. Each word is checked against exactly one value, so all of these are
//! found.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use wideleaf_protocol::message::MismatchKind;
use wideleaf_protocol::{Message, Mismatch, Status};

use crate::{KernelError, Platform};

/// Words of a 4 KiB page.
pub const PAGE_WORDS: u64 = 512;
/// Bits of a word's index in its value; the generation has the remaining bits.
const INDEX_BITS: u32 = 40;
/// Largest number of words: their indices fit below the generation.
pub const WORDS_MAX: u64 = 1 << INDEX_BITS;
/// Generation of the fill. It is not 0, so that no word of any generation is zero.
pub const FIRST_GENERATION: u64 = 1;
/// Last generation that still fits above the index.
pub const LAST_GENERATION: u64 = (1 << (64 - INDEX_BITS)) - 1;

/// An odd factor with its bits spread evenly (2^64 divided by the golden ratio), so that multiplying by it is
/// reversible.
pub const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
/// The factor's inverse modulo 2^64, by Newton's iteration: every step doubles the number of right bits, 3 at first.
const FACTOR_INVERSE: u64 = {
    let mut inverse = FACTOR;
    let mut right_bits = 3;
    while right_bits < 64 {
        inverse = inverse.wrapping_mul(2u64.wrapping_sub(FACTOR.wrapping_mul(inverse)));
        right_bits *= 2;
    }
    inverse
};
const _: () = assert!(FACTOR.wrapping_mul(FACTOR_INVERSE) == 1, "the scrambling must be reversible");

/// The value of word `index` in `generation`. It is one-to-one: two words, or two generations of one word, always
/// have different values, none of them 0.
#[inline]
pub const fn word(index: u64, generation: u64) -> u64 {
    let product = (generation << INDEX_BITS | index).wrapping_mul(FACTOR);
    // Without the shift the low bits of a value would depend only on the low bits of the index.
    product ^ product >> 32
}

/// Index and generation of a value.
pub const fn origin(value: u64) -> (u64, u64) {
    let plain = (value ^ value >> 32).wrapping_mul(FACTOR_INVERSE);
    (plain & (WORDS_MAX - 1), plain >> INDEX_BITS)
}

/// The words that a run has written so far: below `words`, in generations up to `newest_generation`.
#[derive(Clone, Copy, Debug)]
pub struct Written {
    /// Upper bound of the indices, exclusive.
    pub words: u64,
    /// Highest generation of any word.
    pub newest_generation: u64,
}

/// Words that one part of a kernel's work has checked.
pub struct Checked {
    /// Address of the first of them.
    pub address: u64,
    /// Values that they have had.
    pub written: Written,
    /// Number of checks of a word.
    pub checked: u64,
    /// Wrong words among them.
    pub findings: Findings,
}

/// Kind of the value `found`, which was read at the place of word `index` of `generation`.
pub fn classify(found: u64, index: u64, generation: u64, written: Written) -> MismatchKind {
    let (found_index, found_generation) = origin(found);
    let is_written =
        (FIRST_GENERATION..=written.newest_generation).contains(&found_generation) && found_index < written.words;
    match (found, is_written) {
        (0, _) => MismatchKind::Zero,
        (_, true) if found_index == index && found_generation < generation => MismatchKind::Stale,
        (_, true) if found_index != index => MismatchKind::Elsewhere,
        _ => MismatchKind::Foreign,
    }
}

/// Gives a word its first value.
#[inline]
pub fn write_first(slot: &AtomicU64, index: u64) {
    slot.store(word(index, FIRST_GENERATION), Ordering::Relaxed);
}

/// Number of wrong words so far, and the first of them.
#[derive(Debug, Default)]
pub struct Findings {
    errors: AtomicU64,
    has_first: AtomicBool,
    first_index: AtomicU64,
    first_generation: AtomicU64,
    first_found: AtomicU64,
}

impl Findings {
    /// Records `slot` if its value differs from that of word `index` in `generation`.
    #[inline]
    pub fn check(&self, slot: &AtomicU64, index: u64, generation: u64) {
        self.check_value(slot.load(Ordering::Relaxed), index, generation);
    }

    /// As [`check`](Self::check), for a word that was read already.
    #[inline]
    pub fn check_value(&self, found: u64, index: u64, generation: u64) {
        if found != word(index, generation) {
            self.record(index, generation, found);
        }
    }

    /// As [`check`](Self::check), and writes the word's value of the next generation.
    #[inline]
    pub fn check_and_rewrite(&self, slot: &AtomicU64, index: u64, generation: u64) {
        self.check(slot, index, generation);
        slot.store(word(index, generation + 1), Ordering::Relaxed);
    }

    #[cold]
    fn record(&self, index: u64, generation: u64, found: u64) {
        self.errors.fetch_add(1, Ordering::Relaxed);
        if !self.has_first.swap(true, Ordering::Relaxed) {
            self.first_index.store(index, Ordering::Relaxed);
            self.first_generation.store(generation, Ordering::Relaxed);
            self.first_found.store(found, Ordering::Relaxed);
        }
    }

    /// Number of wrong words.
    pub fn errors(&self) -> u64 {
        self.errors.load(Ordering::Relaxed)
    }

    /// The first wrong word, of words that begin at `address`. The leader calls it while no other vCPU records.
    fn first(&self, address: u64, written: Written) -> Option<Mismatch> {
        let [index, generation, found] =
            [&self.first_index, &self.first_generation, &self.first_found].map(|value| value.load(Ordering::Relaxed));
        self.has_first.load(Ordering::Relaxed).then(|| Mismatch {
            address: address + index * 8,
            expected: word(index, generation),
            found,
            kind: classify(found, index, generation, written),
        })
    }

    /// Reports the findings for words that begin at `address`, after `checked` checks of a word.
    pub fn report<'a>(
        &self,
        platform: &dyn Platform,
        address: u64,
        written: Written,
        checked: u64,
    ) -> Result<(), KernelError<'a>> {
        if let Some(mismatch) = self.first(address, written) {
            platform.emit(&Message::Mismatch(mismatch));
        }
        let errors = self.errors();
        let status = if errors == 0 { Status::Pass } else { Status::Fail };
        platform.emit(&Message::Verify { status, errors, checked });
        if errors == 0 { Ok(()) } else { Err(KernelError::VerificationFailed { errors, checked }) }
    }
}
