//! The tags of a set, sixteen bytes at a time.
//!
//! ```text
//!   u32   │ a │ b │ c │ d │        four lanes a vector
//!   u16   │a│b│c│d│e│f│g│h│        eight: half the work, if no tag is larger
//!
//!   work ── run ──▶ AVX2? ─┬─ yes ─▶ work.run(Avx2), in a function compiled for it: 32 bytes at a time
//!                          └─ no ──▶ work.run(Baseline)
//! ```
//!
//! On x86-64 these are SSE2 instructions, which every such processor has, and AVX2 where it is; on other targets, loops
//! over lanes do the same.

#![cfg_attr(
    target_arch = "x86_64",
    expect(
        unsafe_code,
        reason = "a safe function may not call one that names its target features, even features of every target"
    )
)]

use super::NO_TAG;

/// A tag in a set, and its lane.
pub(crate) trait Lane: Copy + Eq {
    /// Value that no key has as its tag, held by empty lanes.
    const EMPTY: Self;
    /// Number of lanes in a vector.
    const OF_A_VECTOR: usize = 16 / size_of::<Self>();

    /// Converts a tag that is known to fit.
    fn new(tag: u32) -> Self;
    /// Returns the tag as a number.
    fn tag(self) -> u32;
    /// One bit for each lane that holds the tag; the number of lanes makes whole vectors.
    fn found<const LANES: usize>(tags: &[Self; LANES], tag: Self) -> u32;
    /// Moves the tags before lane `end` back by one, over the one in `end`, and puts `tag` in front. [`NOWHERE`] as
    /// the end leaves all as they are.
    fn push<const LANES: usize>(tags: &mut [Self; LANES], tag: Self, end: u32);
    /// Moves the tags behind lane `way` forward by one, over the one in `way`, and empties the last lane. The number
    /// of lanes as the way leaves all as they are.
    fn pull<const LANES: usize>(tags: &mut [Self; LANES], way: u32);
}

/// The end of a push that changes nothing: a branch around it could not be predicted.
pub(crate) const NOWHERE: u32 = u32::MAX;

impl Lane for u32 {
    const EMPTY: u32 = NO_TAG;

    #[inline(always)]
    fn new(tag: u32) -> u32 {
        tag
    }

    #[inline(always)]
    fn tag(self) -> u32 {
        self
    }

    #[inline(always)]
    fn found<const LANES: usize>(tags: &[u32; LANES], tag: u32) -> u32 {
        wide::found(tags, tag)
    }

    #[inline(always)]
    fn push<const LANES: usize>(tags: &mut [u32; LANES], tag: u32, end: u32) {
        wide::push(tags, tag, end);
    }

    #[inline(always)]
    fn pull<const LANES: usize>(tags: &mut [u32; LANES], way: u32) {
        wide::pull(tags, way);
    }
}

impl Lane for u16 {
    const EMPTY: u16 = u16::MAX;

    #[inline(always)]
    fn new(tag: u32) -> u16 {
        tag as u16
    }

    #[inline(always)]
    fn tag(self) -> u32 {
        self.into()
    }

    #[inline(always)]
    fn found<const LANES: usize>(tags: &[u16; LANES], tag: u16) -> u32 {
        narrow::found(tags, tag)
    }

    #[inline(always)]
    fn push<const LANES: usize>(tags: &mut [u16; LANES], tag: u16, end: u32) {
        narrow::push(tags, tag, end);
    }

    #[inline(always)]
    fn pull<const LANES: usize>(tags: &mut [u16; LANES], way: u32) {
        narrow::pull(tags, way);
    }
}

/// Operations on a set in the order of use, with the vectors of some processors.
pub(crate) trait Vectors: Copy {
    /// Moves a tag to the front, over the one in lane `last` if it is missing. Returns whether it was.
    #[inline(always)]
    fn access<T: Lane, const LANES: usize>(self, tags: &mut [T; LANES], tag: T, last: usize) -> bool {
        let found = T::found(tags, tag);
        // All tags before it move back by one; if it is missing, all tags do.
        T::push(tags, tag, (found | 1 << last).trailing_zeros());
        found == 0
    }

    /// Puts a tag that is wanted and missing in front, over the one in lane `last`, and leaves the order as it is
    /// otherwise. Returns whether it did.
    #[inline(always)]
    fn complete<T: Lane, const LANES: usize>(
        self,
        tags: &mut [T; LANES],
        tag: T,
        last: usize,
        is_wanted: bool,
    ) -> bool {
        let is_inserted = is_wanted & (T::found(tags, tag) == 0);
        T::push(tags, tag, if is_inserted { last as u32 } else { NOWHERE });
        is_inserted
    }

    /// Removes a tag if that is wanted. Returns whether it did.
    #[inline(always)]
    fn take<T: Lane, const LANES: usize>(self, tags: &mut [T; LANES], tag: T, is_wanted: bool) -> bool {
        let found = if is_wanted { T::found(tags, tag) } else { 0 };
        T::pull(tags, (found | 1 << LANES).trailing_zeros());
        found != 0
    }
}

/// The vectors of every processor of the target.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Baseline;

impl Vectors for Baseline {}

/// Vectors of 32 bytes. A value proves that this processor has AVX2, and the system keeps its registers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2(());

#[cfg(not(target_arch = "x86_64"))]
impl Vectors for Avx2 {}

#[cfg(target_arch = "x86_64")]
impl Vectors for Avx2 {
    #[inline(always)]
    fn access<T: Lane, const LANES: usize>(self, tags: &mut [T; LANES], tag: T, last: usize) -> bool {
        // SAFETY: there is AVX2, as `self` proves.
        unsafe { avx2::access(tags, tag, last) }
    }

    #[inline(always)]
    fn complete<T: Lane, const LANES: usize>(
        self,
        tags: &mut [T; LANES],
        tag: T,
        last: usize,
        is_wanted: bool,
    ) -> bool {
        // SAFETY: as above.
        unsafe { avx2::complete(tags, tag, last, is_wanted) }
    }

    #[inline(always)]
    fn take<T: Lane, const LANES: usize>(self, tags: &mut [T; LANES], tag: T, is_wanted: bool) -> bool {
        // SAFETY: as above.
        unsafe { avx2::take(tags, tag, is_wanted) }
    }
}

impl Avx2 {
    /// The proof, on a processor with AVX2 and the instructions for bits that all such processors have so far.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn of_this_cpu() -> Option<Avx2> {
        use core::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
        // Bits of CPUID (SDM vol. 2): OSXSAVE and AVX; BMI1, AVX2 and BMI2. XCR0: XMM and YMM.
        let (kept, has, registers) = (1 << 27 | 1 << 28, 1 << 3 | 1 << 5 | 1 << 8, 0b110);
        if __cpuid(0).eax < 7 || __cpuid(1).ecx & kept != kept || __cpuid_count(7, 0).ebx & has != has {
            return None;
        }
        // SAFETY: OSXSAVE says that the instruction is enabled.
        let enabled = unsafe { _xgetbv(0) };
        (enabled & registers == registers).then_some(Avx2(()))
    }

    #[cfg(not(target_arch = "x86_64"))]
    pub(crate) fn of_this_cpu() -> Option<Avx2> {
        None
    }
}

/// Work on sets that is compiled twice. An implementation is `#[inline(always)]`, and so is all that it calls: only
/// code that is inlined here is compiled for AVX2.
pub(crate) trait Work {
    type Output;

    fn run(self, vectors: impl Vectors) -> Self::Output;
}

/// Does the work with AVX2 where there is a proof of it.
pub(crate) fn run<W: Work>(work: W, avx2: Option<Avx2>) -> W::Output {
    match avx2 {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: there is AVX2, as the value proves, and what it proves besides.
        Some(avx2) => unsafe { run_with_avx2(work, avx2) },
        _ => work.run(Baseline),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,bmi1,bmi2")]
fn run_with_avx2<W: Work>(work: W, avx2: Avx2) -> W::Output {
    work.run(avx2)
}

/// Prefetches a value into the processor's first cache, without waiting for it.
#[inline(always)]
pub(super) fn bring_near<T>(what: &T) {
    #[cfg(target_arch = "x86_64")]
    {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: SSE is part of x86-64, and a prefetch does nothing else than this, wherever it points.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(core::ptr::from_ref(what).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = what;
}

/// Portable versions of the three functions, and the reference for the tests of the vector ones.
#[cfg(any(test, not(target_arch = "x86_64")))]
mod plain {
    use super::Lane;

    pub(super) fn found<T: Copy + Eq, const LANES: usize>(tags: &[T; LANES], tag: T) -> u32 {
        tags.iter().enumerate().fold(0, |found, (lane, held)| found | u32::from(*held == tag) << lane)
    }

    pub(super) fn push<T: Copy, const LANES: usize>(tags: &mut [T; LANES], tag: T, end: u32) {
        if end != super::NOWHERE {
            tags.copy_within(..end as usize, 1);
            tags[0] = tag;
        }
    }

    pub(super) fn pull<T: Lane, const LANES: usize>(tags: &mut [T; LANES], way: u32) {
        let way = way as usize;
        if way < LANES {
            tags.copy_within(way + 1.., way);
            tags[LANES - 1] = T::EMPTY;
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
use self::{plain as narrow, plain as wide};

/// Largest number of lanes that a set has.
#[cfg(target_arch = "x86_64")]
const LANES_MAX: usize = 24;

/// Defines the three functions of one width from the instructions that differ. `$lanes_of` makes a bit of each lane of
/// two vectors. `$across` says that a lane's neighbour is read from memory, across two vectors. Where those were stored
/// just before, such a load waits for both.
#[cfg(target_arch = "x86_64")]
macro_rules! width {
    (
        $name:ident, $lane:ty, $lanes:literal, $bytes:literal, $splat:ident, $equal:ident, $lanes_of:expr,
        $across:literal
    ) => {
        mod $name {
            use core::arch::x86_64::*;

            use super::LANES_MAX;

            /// Lanes without a bit, and then lanes of all bits.
            static BITS: [$lane; 2 * LANES_MAX] = {
                let (mut bits, mut lane) = ([0; 2 * LANES_MAX], LANES_MAX);
                while lane < bits.len() {
                    bits[lane] = <$lane>::MAX;
                    lane += 1;
                }
                bits
            };

            /// All bits in the lanes from `lane` on.
            #[inline(always)]
            fn from<const LANES: usize>(lane: u32) -> &'static [[$lane; $lanes]] {
                let bits: Option<&[$lane; LANES]> = BITS[LANES_MAX - lane as usize..].first_chunk();
                bits.expect("a lane of the set, or its end").as_chunks().0
            }

            #[inline(always)]
            pub(super) fn found<const LANES: usize>(tags: &[$lane; LANES], tag: $lane) -> u32 {
                // SAFETY: SSE2 is part of x86-64.
                unsafe { found_in(tags, tag) }
            }

            #[inline(always)]
            pub(super) fn push<const LANES: usize>(tags: &mut [$lane; LANES], tag: $lane, end: u32) {
                // SAFETY: as above.
                unsafe { push_to(tags, tag, end) }
            }

            #[inline(always)]
            pub(super) fn pull<const LANES: usize>(tags: &mut [$lane; LANES], way: u32) {
                // SAFETY: as above.
                unsafe { pull_from(tags, way) }
            }

            #[inline]
            #[target_feature(enable = "sse2")]
            fn found_in<const LANES: usize>(tags: &[$lane; LANES], tag: $lane) -> u32 {
                let (tag, vectors, mut found) = ($splat(tag as _), tags.as_chunks::<$lanes>().0, 0);
                for n in (0..LANES / $lanes).step_by(2) {
                    let first = $equal(load(&vectors[n]), tag);
                    let second = match vectors.get(n + 1) {
                        Some(vector) => $equal(load(vector), tag),
                        None => _mm_setzero_si128(),
                    };
                    found |= ($lanes_of(first, second) as u32) << ($lanes * n);
                }
                found
            }

            #[inline]
            #[target_feature(enable = "sse2")]
            fn push_to<const LANES: usize>(tags: &mut [$lane; LANES], tag: $lane, end: u32) {
                let (stay, tag) = (from::<LANES>(end.wrapping_add(1)), _mm_cvtsi32_si128(tag as i32));
                // From the last to the first: each takes a lane of the one before it.
                for n in (0..LANES / $lanes).rev() {
                    let old = load(&tags.as_chunks::<$lanes>().0[n]);
                    let moved = if n == 0 {
                        _mm_or_si128(_mm_slli_si128::<$bytes>(old), tag)
                    } else if $across {
                        load(tags[$lanes * n - 1..].first_chunk().expect("a vector's lanes"))
                    } else {
                        let before = load(&tags.as_chunks::<$lanes>().0[n - 1]);
                        _mm_or_si128(_mm_slli_si128::<$bytes>(old), _mm_srli_si128::<{ 16 - $bytes }>(before))
                    };
                    let stays = load(&stay[n]);
                    let new = _mm_or_si128(_mm_and_si128(stays, old), _mm_andnot_si128(stays, moved));
                    store(&mut tags.as_chunks_mut::<$lanes>().0[n], new);
                }
            }

            #[inline]
            #[target_feature(enable = "sse2")]
            fn pull_from<const LANES: usize>(tags: &mut [$lane; LANES], way: u32) {
                let (moves, last) = (from::<LANES>(way), LANES / $lanes - 1);
                for n in 0..=last {
                    let old = load(&tags.as_chunks::<$lanes>().0[n]);
                    let moved = if n == last {
                        let empty = _mm_slli_si128::<{ 16 - $bytes }>($splat(-1));
                        _mm_or_si128(_mm_srli_si128::<$bytes>(old), empty)
                    } else {
                        load(tags[$lanes * n + 1..].first_chunk().expect("a vector's lanes"))
                    };
                    let moves = load(&moves[n]);
                    let new = _mm_or_si128(_mm_and_si128(moves, moved), _mm_andnot_si128(moves, old));
                    store(&mut tags.as_chunks_mut::<$lanes>().0[n], new);
                }
            }

            #[inline]
            #[target_feature(enable = "sse2")]
            fn load(vector: &[$lane; $lanes]) -> __m128i {
                // SAFETY: sixteen bytes that may be read, aligned in any way.
                unsafe { _mm_loadu_si128(vector.as_ptr().cast()) }
            }

            #[inline]
            #[target_feature(enable = "sse2")]
            fn store(vector: &mut [$lane; $lanes], bits: __m128i) {
                // SAFETY: sixteen bytes that may be written, aligned in any way.
                unsafe { _mm_storeu_si128(vector.as_mut_ptr().cast(), bits) }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
width!(
    wide,
    u32,
    4,
    4,
    _mm_set1_epi32,
    _mm_cmpeq_epi32,
    |first, second| _mm_movemask_ps(_mm_castsi128_ps(first)) | _mm_movemask_ps(_mm_castsi128_ps(second)) << 4,
    false
);

// Only caches of many sets have tags that are so short.
#[cfg(target_arch = "x86_64")]
width!(
    narrow,
    u16,
    8,
    2,
    _mm_set1_epi16,
    _mm_cmpeq_epi16,
    |first, second| _mm_movemask_epi8(_mm_packs_epi16(first, second)),
    true
);

/// The operations of [`Vectors`] on 32 bytes at a time, and on the last 16 of sets with an odd number of these.
#[cfg(target_arch = "x86_64")]
mod avx2 {
    use core::arch::x86_64::*;

    use super::Lane;

    /// Largest number of bytes of a set.
    const BYTES_MAX: usize = 96;

    /// Bytes without a bit, and then bytes of all bits.
    static BITS: [u8; 2 * BYTES_MAX] = {
        let (mut bits, mut byte) = ([0; 2 * BYTES_MAX], BYTES_MAX);
        while byte < bits.len() {
            bits[byte] = u8::MAX;
            byte += 1;
        }
        bits
    };

    /// All bits in the bytes from `byte` of a set on.
    #[inline(always)]
    fn from(byte: usize) -> &'static [u8] {
        &BITS[BYTES_MAX - byte..][..BYTES_MAX]
    }

    /// Whether a lane has two bytes, and not four.
    #[inline(always)]
    const fn is_narrow<T: Lane>() -> bool {
        size_of::<T>() == 2
    }

    /// Number of bits of a lane in what [`found`] returns.
    #[inline(always)]
    const fn bits_of_lane<T: Lane>() -> usize {
        if is_narrow::<T>() { 2 } else { 1 }
    }

    /// The first byte of the lane of the lowest bit.
    #[inline(always)]
    fn byte_of<T: Lane>(found: u64) -> usize {
        found.trailing_zeros() as usize / bits_of_lane::<T>() * size_of::<T>()
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    pub(super) fn access<T: Lane, const LANES: usize>(tags: &mut [T; LANES], tag: T, last: usize) -> bool {
        let found = found(tags, tag);
        push(tags, tag, byte_of::<T>(found | 1 << (bits_of_lane::<T>() * last)) + size_of::<T>());
        found == 0
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    pub(super) fn complete<T: Lane, const LANES: usize>(
        tags: &mut [T; LANES],
        tag: T,
        last: usize,
        is_wanted: bool,
    ) -> bool {
        let is_inserted = is_wanted & (found(tags, tag) == 0);
        // Not by a branch, which could not be predicted.
        push(tags, tag, (last + 1) * size_of::<T>() * usize::from(is_inserted));
        is_inserted
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    pub(super) fn take<T: Lane, const LANES: usize>(tags: &mut [T; LANES], tag: T, is_wanted: bool) -> bool {
        let found = if is_wanted { found(tags, tag) } else { 0 };
        pull(tags, byte_of::<T>(found | 1 << (bits_of_lane::<T>() * LANES)));
        found != 0
    }

    /// The bits of the lane that holds the tag.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn found<T: Lane, const LANES: usize>(tags: &mut [T; LANES], tag: T) -> u64 {
        let (bytes, number) = (bytes_of(tags), tag.tag() as i32);
        let sought = if is_narrow::<T>() { _mm256_set1_epi16(number as i16) } else { _mm256_set1_epi32(number) };
        let bits_of_vector = 32 / size_of::<T>() * bits_of_lane::<T>();
        let wholes = bytes.len() / 32;
        let mut found = 0;
        for n in 0..wholes {
            let tags = load(bytes, 32 * n);
            let equal = if is_narrow::<T>() {
                _mm256_movemask_epi8(_mm256_cmpeq_epi16(tags, sought))
            } else {
                _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(tags, sought)))
            };
            found |= u64::from(equal as u32) << (bits_of_vector * n);
        }
        if has_half(bytes) {
            let (tags, sought) = (load_half(bytes, 32 * wholes), _mm256_castsi256_si128(sought));
            let equal = if is_narrow::<T>() {
                _mm_movemask_epi8(_mm_cmpeq_epi16(tags, sought))
            } else {
                _mm_movemask_ps(_mm_castsi128_ps(_mm_cmpeq_epi32(tags, sought)))
            };
            found |= u64::from(equal as u32) << (bits_of_vector * wholes);
        }
        found
    }

    /// Moves the lanes before byte `end` back by one, over the last of them, and puts `tag` in front. Zero as the end
    /// leaves all as they are.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn push<T: Lane, const LANES: usize>(tags: &mut [T; LANES], tag: T, end: usize) {
        let (stay, front, bytes) = (from(end), _mm_cvtsi32_si128(tag.tag() as i32), bytes_of(tags));
        let wholes = bytes.len() / 32;
        // From the last to the first: each takes a lane of the one before it.
        if has_half(bytes) {
            let old = load_half(bytes, 32 * wholes);
            let moved = if wholes == 0 {
                _mm_or_si128(half_back::<T>(old, _mm_setzero_si128()), front)
            } else {
                half_back::<T>(old, load_half(bytes, 32 * wholes - 16))
            };
            store_half(bytes, 32 * wholes, _mm_blendv_epi8(moved, old, load_half(stay, 32 * wholes)));
        }
        for n in (0..wholes).rev() {
            let old = load(bytes, 32 * n);
            let moved = if n == 0 {
                let before = _mm256_permute2x128_si256::<0x08>(old, old);
                _mm256_or_si256(back::<T>(old, before), _mm256_zextsi128_si256(front))
            } else {
                back::<T>(old, _mm256_permute2x128_si256::<0x21>(load(bytes, 32 * n - 32), old))
            };
            store(bytes, 32 * n, _mm256_blendv_epi8(moved, old, load(stay, 32 * n)));
        }
    }

    /// Moves the lanes behind the one at byte `to` forward by one, over that one, and empties the last lane. The number
    /// of bytes leaves all as they are.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn pull<T: Lane, const LANES: usize>(tags: &mut [T; LANES], to: usize) {
        let (move_from, bytes) = (from(to), bytes_of(tags));
        let (wholes, empty) = (bytes.len() / 32, _mm256_set1_epi8(-1));
        for n in 0..wholes {
            let old = load(bytes, 32 * n);
            let next = if n + 1 < wholes {
                load(bytes, 32 * n + 32)
            } else if has_half(bytes) {
                _mm256_zextsi128_si256(load_half(bytes, 32 * n + 32))
            } else {
                empty
            };
            let moved = forward::<T>(old, _mm256_permute2x128_si256::<0x21>(old, next));
            store(bytes, 32 * n, _mm256_blendv_epi8(old, moved, load(move_from, 32 * n)));
        }
        if has_half(bytes) {
            let old = load_half(bytes, 32 * wholes);
            let moved = half_forward::<T>(old, _mm256_castsi256_si128(empty));
            store_half(bytes, 32 * wholes, _mm_blendv_epi8(old, moved, load_half(move_from, 32 * wholes)));
        }
    }

    /// Each half's lanes one further back, behind the last lane of the half before it.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn back<T: Lane>(halves: __m256i, before: __m256i) -> __m256i {
        if is_narrow::<T>() {
            _mm256_alignr_epi8::<14>(halves, before)
        } else {
            _mm256_alignr_epi8::<12>(halves, before)
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn half_back<T: Lane>(half: __m128i, before: __m128i) -> __m128i {
        if is_narrow::<T>() { _mm_alignr_epi8::<14>(half, before) } else { _mm_alignr_epi8::<12>(half, before) }
    }

    /// Each half's lanes one further to the front, before the first lane of the half behind it.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn forward<T: Lane>(halves: __m256i, behind: __m256i) -> __m256i {
        if is_narrow::<T>() { _mm256_alignr_epi8::<2>(behind, halves) } else { _mm256_alignr_epi8::<4>(behind, halves) }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn half_forward<T: Lane>(half: __m128i, behind: __m128i) -> __m128i {
        if is_narrow::<T>() { _mm_alignr_epi8::<2>(behind, half) } else { _mm_alignr_epi8::<4>(behind, half) }
    }

    #[inline(always)]
    fn bytes_of<T: Lane, const LANES: usize>(tags: &mut [T; LANES]) -> &mut [u8] {
        let length = size_of_val(tags);
        // SAFETY: lanes are integers, so that all their bytes are, and any bytes make lanes.
        unsafe { core::slice::from_raw_parts_mut(tags.as_mut_ptr().cast(), length) }
    }

    /// Whether 16 bytes are left behind the vectors of 32.
    #[inline(always)]
    fn has_half(bytes: &[u8]) -> bool {
        bytes.len() % 32 == 16
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn load(bytes: &[u8], at: usize) -> __m256i {
        let vector: &[u8; 32] = bytes[at..].first_chunk().expect("a vector of the set");
        // SAFETY: bytes that may be read, aligned in any way.
        unsafe { _mm256_loadu_si256(vector.as_ptr().cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn load_half(bytes: &[u8], at: usize) -> __m128i {
        let vector: &[u8; 16] = bytes[at..].first_chunk().expect("half a vector of the set");
        // SAFETY: as above.
        unsafe { _mm_loadu_si128(vector.as_ptr().cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn store(bytes: &mut [u8], at: usize, bits: __m256i) {
        let vector: &mut [u8; 32] = bytes[at..].first_chunk_mut().expect("a vector of the set");
        // SAFETY: bytes that may be written, aligned in any way.
        unsafe { _mm256_storeu_si256(vector.as_mut_ptr().cast(), bits) }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn store_half(bytes: &mut [u8], at: usize, bits: __m128i) {
        let vector: &mut [u8; 16] = bytes[at..].first_chunk_mut().expect("half a vector of the set");
        // SAFETY: as above.
        unsafe { _mm_storeu_si128(vector.as_mut_ptr().cast(), bits) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check<T: Lane + core::fmt::Debug, const LANES: usize>() {
        let tags: [T; LANES] = core::array::from_fn(|lane| T::new(lane as u32 * 7 % 11));
        for tag in (0..12).chain([T::EMPTY.tag()]).map(T::new) {
            assert_eq!(T::found(&tags, tag), plain::found(&tags, tag), "{tag:?} in {tags:?}");
            for end in (0..LANES as u32).chain([NOWHERE]) {
                let (mut pushed, mut expected) = (tags, tags);
                T::push(&mut pushed, tag, end);
                plain::push(&mut expected, tag, end);
                assert_eq!(pushed, expected, "{tag:?} to {tags:?} as far as {end}");
            }
        }
        for way in 0..=LANES as u32 {
            let (mut pulled, mut expected) = (tags, tags);
            T::pull(&mut pulled, way);
            plain::pull(&mut expected, way);
            assert_eq!(pulled, expected, "{way} of {tags:?}");
        }
        if let Some(avx2) = Avx2::of_this_cpu() {
            for tag in (0..12).map(T::new) {
                check_alike(avx2, tags, tag);
            }
        }
    }

    /// Both kinds of vectors make the same of a set and a tag.
    fn check_alike<T: Lane + core::fmt::Debug, const LANES: usize>(avx2: Avx2, tags: [T; LANES], tag: T) {
        let (mut wide, mut narrow) = (tags, tags);
        for last in 0..LANES {
            let missing = [avx2.access(&mut wide, tag, last), Baseline.access(&mut narrow, tag, last)];
            assert_eq!((missing[0], wide), (missing[1], narrow), "{tag:?} to {tags:?}, the last way is {last}");
            for is_wanted in [true, false] {
                let taken = [avx2.take(&mut wide, tag, is_wanted), Baseline.take(&mut narrow, tag, is_wanted)];
                assert_eq!((taken[0], wide), (taken[1], narrow), "{tag:?} out of {tags:?}: {is_wanted}");
                let inserted = [
                    avx2.complete(&mut wide, tag, last, !is_wanted),
                    Baseline.complete(&mut narrow, tag, last, !is_wanted),
                ];
                assert_eq!((inserted[0], wide), (inserted[1], narrow), "{tag:?} to {tags:?}: {}", !is_wanted);
            }
        }
    }

    #[test]
    fn vectors_give_the_same_results_as_loops_over_lanes() {
        check::<u32, 4>();
        check::<u32, 8>();
        check::<u32, 12>();
        check::<u32, 16>();
        check::<u32, 20>();
        check::<u16, 8>();
        check::<u16, 16>();
        check::<u16, 24>();
    }
}
