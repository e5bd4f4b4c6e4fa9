//! The tags of a set, sixteen bytes at a time.
//!
//! ```text
//!   u32   │ a │ b │ c │ d │        four lanes a vector
//!   u16   │a│b│c│d│e│f│g│h│        eight: half the work, if no tag is larger
//! ```
//!
//! On x86-64 these are SSE2 instructions, which every such processor has; on other targets, loops over lanes
//! do the same.

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
    /// Moves the tags before lane `end` back by one, over the one in `end`, and puts `tag` in front.
    fn push<const LANES: usize>(tags: &mut [Self; LANES], tag: Self, end: u32);
}

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

/// Portable versions of the two functions, and the reference for the tests of the vector ones.
#[cfg(any(test, not(target_arch = "x86_64")))]
mod plain {
    pub(super) fn found<T: Copy + Eq, const LANES: usize>(tags: &[T; LANES], tag: T) -> u32 {
        tags.iter().enumerate().fold(0, |found, (lane, held)| found | u32::from(*held == tag) << lane)
    }

    pub(super) fn push<T: Copy, const LANES: usize>(tags: &mut [T; LANES], tag: T, end: u32) {
        tags.copy_within(..end as usize, 1);
        tags[0] = tag;
    }
}

#[cfg(not(target_arch = "x86_64"))]
use self::{plain as narrow, plain as wide};

/// Defines the two functions of one width from the instructions that differ.
#[cfg(target_arch = "x86_64")]
macro_rules! width {
    (
        $name:ident, $lane:ty, $lanes:literal, $bytes:literal, $splat:ident, $equal:ident, $greater:ident,
        $lane_bits:expr, $count:expr
    ) => {
        mod $name {
            use core::arch::x86_64::*;

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

            #[inline]
            #[target_feature(enable = "sse2")]
            fn found_in<const LANES: usize>(tags: &[$lane; LANES], tag: $lane) -> u32 {
                let (tag, mut found) = ($splat(tag as _), 0);
                for (n, vector) in tags.as_chunks::<$lanes>().0.iter().enumerate() {
                    found |= ($lane_bits($equal(load(vector), tag)) as u32) << ($lanes * n);
                }
                found
            }

            #[inline]
            #[target_feature(enable = "sse2")]
            fn push_to<const LANES: usize>(tags: &mut [$lane; LANES], tag: $lane, end: u32) {
                let (end, mut pushed) = ($splat(end as _), _mm_cvtsi32_si128(tag as i32));
                for (n, vector) in tags.as_chunks_mut::<$lanes>().0.iter_mut().enumerate() {
                    let old = load(vector);
                    let stays = $greater($count(($lanes * n) as _), end);
                    let moved = _mm_or_si128(_mm_slli_si128::<$bytes>(old), pushed);
                    let new = _mm_or_si128(_mm_and_si128(stays, old), _mm_andnot_si128(stays, moved));
                    pushed = _mm_srli_si128::<{ 16 - $bytes }>(old);
                    store(vector, new);
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
    _mm_cmpgt_epi32,
    |equal| _mm_movemask_ps(_mm_castsi128_ps(equal)),
    |n: i32| _mm_setr_epi32(n, n + 1, n + 2, n + 3)
);

#[cfg(target_arch = "x86_64")]
width!(
    narrow,
    u16,
    8,
    2,
    _mm_set1_epi16,
    _mm_cmpeq_epi16,
    _mm_cmpgt_epi16,
    |equal| _mm_movemask_epi8(_mm_packs_epi16(equal, _mm_setzero_si128())),
    |n: i16| _mm_setr_epi16(n, n + 1, n + 2, n + 3, n + 4, n + 5, n + 6, n + 7)
);

#[cfg(test)]
mod tests {
    use super::*;

    fn check<T: Lane + core::fmt::Debug, const LANES: usize>() {
        let tags: [T; LANES] = core::array::from_fn(|lane| T::new(lane as u32 * 7 % 11));
        for tag in (0..12).chain([T::EMPTY.tag()]).map(T::new) {
            assert_eq!(T::found(&tags, tag), plain::found(&tags, tag), "{tag:?} in {tags:?}");
            for end in 0..LANES as u32 {
                let (mut pushed, mut expected) = (tags, tags);
                T::push(&mut pushed, tag, end);
                plain::push(&mut expected, tag, end);
                assert_eq!(pushed, expected, "{tag:?} to {tags:?} as far as {end}");
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
