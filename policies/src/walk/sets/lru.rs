//! A set under true LRU: its tags in the order of their use.
//!
//! ```text
//!   before  a b c d e        access c:  c a b d e        access x:  x a b c d ──▶ e
//! ```

use super::find_in;

/// Looks a tag up and brings it to the front; what fell out at the end where it was missing, `None` where it was there.
#[inline]
pub(super) fn access(tags: &mut [u32], tag: u32) -> Option<u32> {
    if tags[0] == tag {
        return None;
    }
    match tags.len() {
        2 => access_in::<2>(tags, tag),
        4 => access_in::<4>(tags, tag),
        8 => access_in::<8>(tags, tag),
        12 => access_in::<12>(tags, tag),
        16 => access_in::<16>(tags, tag),
        20 => access_in::<20>(tags, tag),
        _ => access_many(tags, tag),
    }
}

/// The same work whatever is found and wherever: nothing of it can be predicted.
#[inline]
fn access_in<const WAYS: usize>(tags: &mut [u32], tag: u32) -> Option<u32> {
    let tags: &mut [u32; WAYS] = tags.try_into().ok()?;
    let old = *tags;
    match find_in(&old, tag) {
        None => {
            tags[1..].copy_from_slice(&old[..WAYS - 1]);
            tags[0] = tag;
            Some(old[WAYS - 1])
        }
        Some(found) => {
            for way in 1..WAYS {
                tags[way] = if way <= found { old[way - 1] } else { old[way] };
            }
            tags[0] = tag;
            None
        }
    }
}

/// For large sets: what is used again soon is near the front.
fn access_many(tags: &mut [u32], tag: u32) -> Option<u32> {
    match super::find_in_many(tags, tag) {
        None => {
            let evicted = tags[tags.len() - 1];
            tags.copy_within(..tags.len() - 1, 1);
            tags[0] = tag;
            Some(evicted)
        }
        Some(way) => {
            tags.copy_within(..way, 1);
            tags[0] = tag;
            None
        }
    }
}
