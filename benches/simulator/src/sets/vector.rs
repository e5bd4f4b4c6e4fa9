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
