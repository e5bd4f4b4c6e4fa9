//! Parser for the answer to QEMU's `info mtree -f`: guest-physical ranges of the RAM blocks, with their offsets
//! in the blocks.
//!
//! ```text
//!   FlatView #2
//!    AS "memory", root: system
//!     0000000000000000-00000000000bffff (prio 0, ram): pc.ram KVM                        ┐ one piece: the same block,
//!     00000000000c0000-00000000000fffff (prio 1, rom): pc.rom KVM                        │ and address less offset
//!     0000000000100000-000000007fffffff (prio 0, ram): pc.ram @0000000000100000 KVM      ┘ is the same
//!     0000000100000000-000000015fffffff (prio 0, ram): pc.ram @0000000080000000 KVM      another
//! ```
//!
//! ROMs and the firmware's devices cut up the first MiB. The block continues after these holes, and so
//! does the piece.

use wideleaf_policies::{Bytes, Gpa, GpaRange};

/// Upper bound on the lines read: a guest of 512 vCPUs with as many devices has some 10,000.
const LINES_MAX: usize = 1 << 18;

/// Upper bound on the pieces read: QEMU has 256 slots for plugged memory, and 128 nodes.
pub const PIECES_MAX: usize = 1024;

/// Part of a RAM block in the guest's address space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockPiece {
    /// Name of the block, which is that of its memory backend.
    pub block: String,
    /// Guest-physical range of the part.
    pub gpa: GpaRange,
    /// Offset of the part in the block.
    pub offset: Bytes,
}

/// The pieces of RAM that KVM maps in the address space `memory`, ascending. `is_ram` selects the blocks, which
/// leaves out ROMs and video memory.
pub fn ram_pieces(text: &str, is_ram: impl Fn(&str) -> bool) -> Vec<BlockPiece> {
    let mut pieces: Vec<BlockPiece> = Vec::new();
    for piece in memory_view(text).filter_map(ram_line).filter(|piece| is_ram(&piece.block)) {
        match pieces.iter().position(|known| continues(known, &piece)) {
            Some(known) => pieces[known].gpa = reach(pieces[known].gpa, piece.gpa),
            None if pieces.len() == PIECES_MAX => break,
            None => pieces.push(piece),
        }
    }
    pieces
}

/// The lines of the view that belongs to the address space `memory`.
fn memory_view(text: &str) -> impl Iterator<Item = &str> {
    let mut is_memory = false;
    text.lines().take(LINES_MAX).map(str::trim).filter(move |line| {
        if line.starts_with("FlatView") {
            is_memory = false;
        }
        is_memory |= line.starts_with("AS \"memory\",");
        is_memory
    })
}

/// Parses `0000000000100000-000000007fffffff (prio 0, ram): pc.ram @0000000000100000 KVM`.
fn ram_line(line: &str) -> Option<BlockPiece> {
    let (bounds, rest) = line.split_once(" (prio ")?;
    let (_, rest) = rest.split_once(", ram): ")?;
    let rest = rest.strip_suffix(" KVM")?;
    let (block, offset) = rest.split_once(" @").map_or((rest, Some(0)), |(block, at)| (block, hexadecimal(at)));
    let (first, last) = bounds.split_once('-')?;
    let (first, last) = (hexadecimal(first)?, hexadecimal(last)?);
    let bytes = last.checked_sub(first)?.checked_add(1)?;
    let gpa = GpaRange::new(Gpa::new(first), Bytes::new(bytes))?;
    Some(BlockPiece { block: block.to_owned(), gpa, offset: Bytes::new(offset?) })
}

fn hexadecimal(text: &str) -> Option<u64> {
    u64::from_str_radix(text, 16).ok()
}

/// Whether `next` follows `piece` in the same block, at the same distance of address and offset.
fn continues(piece: &BlockPiece, next: &BlockPiece) -> bool {
    let base = |piece: &BlockPiece| piece.gpa.start().get().wrapping_sub(piece.offset.get());
    piece.block == next.block && base(piece) == base(next) && piece.gpa.end() <= next.gpa.start()
}

/// Range from the start of one to the end of the other.
fn reach(from: GpaRange, to: GpaRange) -> GpaRange {
    GpaRange::new(from.start(), to.end() - from.start()).expect("it ends where a range ends")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use wideleaf_policies::units::{gib, mib};

    const Q35: &str = "FlatView #0\n AS \"I/O\", root: io\n Root memory region: io\n\
        \u{20} 0000000000000000-0000000000000007 (prio 0, ram): pc.ram KVM\n\n\
        FlatView #2\r\n AS \"memory\", root: system\r\n AS \"cpu-memory-0\", root: system\r\n \
        Root memory region: system\r\n\
        \u{20} 0000000000000000-000000000009ffff (prio 0, ram): pc.ram KVM\r\n\
        \u{20} 00000000000a0000-00000000000bffff (prio 1, i/o): vga-lowmem\r\n\
        \u{20} 00000000000c0000-00000000000fffff (prio 1, rom): pc.rom KVM\r\n\
        \u{20} 0000000000100000-000000007fffffff (prio 0, ram): pc.ram @0000000000100000 KVM\r\n\
        \u{20} 00000000fd000000-00000000fdffffff (prio 1, ram): vga.vram KVM\r\n\
        \u{20} 00000000fffc0000-00000000ffffffff (prio 0, rom): pc.bios KVM\r\n\
        \u{20} 0000000100000000-000000015fffffff (prio 0, ram): pc.ram @0000000080000000 KVM\r\n\
        \u{20} 0000000160000000-000000016fffffff (prio 0, ram): memdimm0 KVM\r\n";

    fn piece(block: &str, start: u64, bytes: Bytes, offset: Bytes) -> BlockPiece {
        BlockPiece { block: block.into(), gpa: GpaRange::new(Gpa::new(start), bytes).expect("fits"), offset }
    }

    #[test]
    fn a_block_is_cut_where_its_addresses_jump_and_nowhere_else() {
        let expected = [
            piece("pc.ram", 0, gib(2), Bytes::ZERO),
            piece("pc.ram", 4 << 30, mib(1536), gib(2)),
            piece("memdimm0", 0x1_6000_0000, mib(256), Bytes::ZERO),
        ];
        assert_eq!(ram_pieces(Q35, |block| block != "vga.vram"), expected);
    }

    #[test]
    fn other_address_spaces_and_blocks_are_left_out() {
        assert_eq!(ram_pieces(Q35, |_| false), []);
        assert_eq!(ram_pieces("FlatView #0\n AS \"I/O\", root: io\n", |_| true), []);
    }

    #[test]
    fn a_tree_without_end_gives_a_bounded_number_of_pieces() {
        let line = |index: u64| format!("{:x}-{:x} (prio 0, ram): b{index} KVM\n", index << 12, (index << 12) + 0xfff);
        let text = " AS \"memory\", root: system\n".to_owned() + &(0..5000).map(line).collect::<String>();
        assert_eq!(ram_pieces(&text, |_| true).len(), PIECES_MAX);
    }

    proptest! {
        #[test]
        fn any_text_gives_valid_pieces(
            lines in prop::collection::vec(
                "[0-9a-f]{0,17}-[0-9a-f]{0,17} \\(prio [0-9], ram\\): .{0,20}( @[0-9a-f]{0,17})?( KVM)?|.{0,60}",
                0..20,
            ),
        ) {
            let text = format!(" AS \"memory\", root: system\n{}", lines.join("\n"));
            let pieces = ram_pieces(&text, |_| true);
            prop_assert!(pieces.len() <= lines.len());
            for piece in pieces {
                prop_assert!(piece.gpa.bytes() > Bytes::ZERO);
            }
        }
    }
}
