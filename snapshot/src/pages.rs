//! Pages in a window's bytes: where they are, whether they are zero, and their checksums.

use std::ops::Range;

use wideleaf_policies::{PageSize, WindowIndex};

/// Bytes of a base page.
pub(crate) const PAGE_BYTES: usize = PageSize::Base4K.bytes().as_usize();
/// Bytes of a window.
pub(crate) const WINDOW_BYTES: usize = PageSize::Huge2M.bytes().as_usize();
/// Bytes that are compared with zero at once, word by word: the compiler makes vectors of them.
const BLOCK_BYTES: usize = 256;

/// Places of these pages in a window's bytes.
pub(crate) fn bytes_of(pages: &Range<u16>) -> Range<usize> {
    usize::from(pages.start) * PAGE_BYTES..usize::from(pages.end) * PAGE_BYTES
}

/// Place of one page in a window's bytes.
pub(crate) fn place_of(page: u16) -> Range<usize> {
    bytes_of(&(page..page + 1))
}

/// Offset of a page in the file `memory`.
pub(crate) fn offset_of(window: WindowIndex, page: u16) -> u64 {
    window.start().get() + u64::from(page) * PAGE_BYTES as u64
}

/// Whether all bytes of a page are zero. A page in use ends the search in its first block, as a rule.
pub fn is_zero(page: &[u8]) -> bool {
    let any = |block: &[u8]| block.as_chunks::<8>().0.iter().fold(0, |any, bytes| any | u64::from_ne_bytes(*bytes));
    page.chunks_exact(BLOCK_BYTES).all(|block| any(block) == 0)
}

/// CRC-32 of a page (IEEE 802.3, as in gzip).
pub(crate) fn checksum(page: &[u8]) -> u32 {
    crc32fast::hash(page)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_bit_anywhere_makes_a_page_not_zero() {
        let mut page = vec![0; PAGE_BYTES];
        assert!(is_zero(&page));
        for at in 0..PAGE_BYTES {
            page[at] = 1 << (at % 8);
            assert!(!is_zero(&page), "byte {at}");
            page[at] = 0;
        }
    }

    #[test]
    fn the_checksum_is_the_crc_32_of_gzip() {
        // The check value of the catalogue of parametrised CRC algorithms, "CRC-32/ISO-HDLC".
        assert_eq!(checksum(b"123456789"), 0xcbf4_3926);
    }
}
