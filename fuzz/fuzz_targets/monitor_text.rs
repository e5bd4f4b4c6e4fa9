//! Input: texts of other programs, which no protocol frames: QEMU's `info mtree -f` and `info registers`, and the
//! status file of a libvirt domain. Each is read without a panic, and the pieces of RAM are bounded by the lines of the
//! text.
#![no_main]

use libfuzzer_sys::fuzz_target;
use wideleaf_attach::mtree::{PIECES_MAX, ram_pieces};
use wideleaf_attach::registers::paging_mode;
use wideleaf_attach::virsh::job_of_status;
use wideleaf_policies::Bytes;

fuzz_target!(|text: &str| {
    let pieces = ram_pieces(text, |block| block != "vga.vram");
    assert!(pieces.len() <= PIECES_MAX.min(text.lines().count()));
    assert!(pieces.iter().all(|piece| piece.gpa.bytes() > Bytes::ZERO && piece.block != "vga.vram"));
    let _ = paging_mode(text);
    let _ = job_of_status(text);
});
