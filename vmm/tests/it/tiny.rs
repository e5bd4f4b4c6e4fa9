//! Images of a few instructions, for the tests that run them on real KVM.

/// Address of the guests' code.
pub const CODE: u64 = 0x20_0000;

/// Whether there is KVM; if not, prints that, or fails where `WIDELEAF_REQUIRE` demands it.
pub fn has_kvm() -> bool {
    if std::path::Path::new("/dev/kvm").exists() {
        return true;
    }
    let required = std::env::var("WIDELEAF_REQUIRE").unwrap_or_default();
    assert!(
        !required.split(',').any(|word| word.trim() == "kvm"),
        "WIDELEAF_REQUIRE has kvm, and there is no /dev/kvm"
    );
    eprintln!("skipped: there is no /dev/kvm (run it in guest-tests/lab, or on a host with KVM)");
    false
}

fn note(owner: &[u8], kind: u32, descriptor: &[u8]) -> Vec<u8> {
    let mut note = Vec::new();
    note.extend((owner.len() as u32).to_le_bytes());
    note.extend((descriptor.len() as u32).to_le_bytes());
    note.extend(kind.to_le_bytes());
    note.extend(owner);
    note.resize(note.len().next_multiple_of(4), 0);
    note.extend(descriptor);
    note
}

/// An ELF file with this code at [`CODE`] and both notes.
pub fn image(code: &[u8]) -> Vec<u8> {
    let direct = [&1u32.to_le_bytes()[..], &[0; 4], &CODE.to_le_bytes()].concat();
    let notes = [note(b"wideleaf\0", 1, &direct), note(b"Xen\0", 18, &CODE.to_le_bytes())].concat();
    let mut file = vec![0; 64];
    file[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
    file[16..20].copy_from_slice(&[2, 0, 62, 0]);
    file[32] = 64;
    file[54] = 56;
    file[56] = 2;
    let contents_at = 64 + 2 * 56;
    for (kind, address, bytes, at) in [(1u32, CODE, code, contents_at), (4, 0, &notes, contents_at + code.len())] {
        file.extend(kind.to_le_bytes());
        file.extend(7u32.to_le_bytes());
        for word in [at as u64, address, address, bytes.len() as u64, bytes.len() as u64, 4] {
            file.extend(word.to_le_bytes());
        }
    }
    file.extend(code);
    file.extend(notes);
    file
}
