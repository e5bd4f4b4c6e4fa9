//! Exit codes, boot data, command lines and ELF notes: both sides agree on them.

use proptest::prelude::*;
use wideleaf_protocol::arguments::{CommandLineError, parse_count, parse_size};
use wideleaf_protocol::direct::{DIRECT_BOOT_BYTES, DIRECT_BOOT_VERSION, DirectBootError};
use wideleaf_protocol::elf_note::{self, DirectNote};
use wideleaf_protocol::{Argument, CommandLine, DirectBoot, ExitCode, Name, RamRange};

const MIB: u64 = 1 << 20;

#[test]
fn success_is_qemu_status_one_and_every_code_comes_back() {
    assert_eq!(ExitCode::Success.qemu_status(), 1);
    assert_eq!(ExitCode::BadArguments.qemu_status(), 5);
    for code in ExitCode::ALL {
        assert_eq!(ExitCode::from_port_value(code.port_value()), Some(code));
        assert_eq!(ExitCode::from_qemu_status(code.qemu_status()), Some(code));
    }
    assert_eq!(ExitCode::from_port_value(7), None);
    assert_eq!(ExitCode::from_qemu_status(0), None);
}

proptest! {
    #[test]
    fn boot_data_survive_guest_memory(words in proptest::collection::vec(any::<u8>(), DIRECT_BOOT_BYTES)) {
        let bytes: [u8; DIRECT_BOOT_BYTES] = words.try_into().unwrap();
        prop_assert_eq!(DirectBoot::from_bytes(&bytes).to_bytes(), bytes);
    }

    #[test]
    fn no_boot_data_upset_the_validation(words in proptest::collection::vec(any::<u8>(), DIRECT_BOOT_BYTES)) {
        let bytes: [u8; DIRECT_BOOT_BYTES] = words.try_into().unwrap();
        let mut boot = DirectBoot::from_bytes(&bytes);
        boot.magic = DirectBoot::default().magic;
        let _ = boot.validate();
        let _ = boot.ram();
    }

    #[test]
    fn no_file_upsets_the_note_reader(mut file in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = elf_note::notes(&file).count();
        for identification in [b"\x7fELF\x01\x01", b"\x7fELF\x02\x01"] {
            let length = identification.len().min(file.len());
            file[..length].copy_from_slice(&identification[..length]);
            prop_assert!(elf_note::notes(&file).count() < 1 << 20);
        }
    }

    #[test]
    fn no_command_line_upsets_its_reader(text in any::<String>()) {
        if let Ok(line) = CommandLine::new(&text) {
            let _ = line.arguments().count();
        }
        let _ = (parse_size(&text), parse_count(&text), Name::new(&text));
    }
}

#[test]
fn boot_data_with_two_ram_ranges_are_valid() {
    // 1 GiB below the 32-bit hole, 1 GiB above it.
    let mut boot = DirectBoot::default();
    boot.push_ram(RamRange { gpa: 0, bytes: 1024 * MIB }).unwrap();
    boot.push_ram(RamRange { gpa: 4096 * MIB, bytes: 1024 * MIB }).unwrap();
    assert_eq!(boot.validate(), Ok(()));
    assert_eq!(boot.ram().len(), 2);
}

#[test]
fn boot_data_that_contradict_themselves_are_refused() {
    let mut boot = DirectBoot::default();
    assert_eq!(boot.validate(), Err(DirectBootError::RamRangeCount { found: 0 }));
    boot.push_ram(RamRange { gpa: 0, bytes: 64 * MIB }).unwrap();
    boot.push_ram(RamRange { gpa: 63 * MIB, bytes: 64 * MIB }).unwrap();
    assert_eq!(boot.validate(), Err(DirectBootError::RamRange { index: 1 }));
    assert_eq!(DirectBoot { vcpus: 17, ..boot }.validate(), Err(DirectBootError::Vcpus { found: 17 }));
    assert_eq!(DirectBoot { magic: 0, ..boot }.validate(), Err(DirectBootError::Magic { found: 0 }));
    assert_eq!(
        DirectBoot { version: DIRECT_BOOT_VERSION + 1, ..boot }.validate(),
        Err(DirectBootError::Version { found: DIRECT_BOOT_VERSION + 1 })
    );
    let odd_page = DirectBoot { guest_page_bytes: 8192, ..boot };
    assert_eq!(odd_page.validate(), Err(DirectBootError::GuestPage { bytes: 8192 }));
}

#[test]
fn a_ninth_ram_range_is_handed_back() {
    let mut boot = DirectBoot::default();
    for index in 0..8 {
        boot.push_ram(RamRange { gpa: index * MIB, bytes: MIB }).unwrap();
    }
    let ninth = RamRange { gpa: 8 * MIB, bytes: MIB };
    assert_eq!(boot.push_ram(ninth), Err(ninth));
}

#[test]
fn a_bare_first_word_is_the_kernel_and_the_kernel_does_not_see_image_keys() {
    let line = CommandLine::new(" gups  log2_words=20 guest_pages=4k virtio_mmio.device=512@0xfeb00000:5").unwrap();
    assert_eq!(line.value("kernel"), Some("gups"));
    assert_eq!(line.value("guest_pages"), Some("4k"));
    assert_eq!(line.value("vcpus"), None);
    let kernel: Vec<_> = line.kernel_arguments().collect();
    assert_eq!(kernel, [Argument { key: "log2_words", value: "20" }]);
}

#[test]
fn a_word_without_equals_sign_or_a_repeated_key_is_refused() {
    assert_eq!(CommandLine::new("gups fast"), Err(CommandLineError::NotAPair { word: "fast" }));
    assert_eq!(CommandLine::new("gups =1"), Err(CommandLineError::NotAPair { word: "=1" }));
    assert_eq!(CommandLine::new("gups kernel=gups"), Err(CommandLineError::DuplicateKey { key: "kernel" }));
    assert_eq!(CommandLine::new("a=1 b=2 a=1"), Err(CommandLineError::DuplicateKey { key: "a" }));
}

#[test]
fn a_long_word_is_not_repeated_whole() {
    let word = "é".repeat(17);
    let error = CommandLine::new("gups ok=1 fast").expect_err("no pair").to_string();
    assert!(error.starts_with("\"fast\" is not key=value"), "{error}");
    let line = format!("gups {word}");
    let error = CommandLine::new(&line).expect_err("no pair").to_string();
    assert!(error.starts_with(&format!("\"{}...\" is not key=value", "é".repeat(16))), "{error}");
    let line = format!("{word}=1 {word}=2");
    let error = CommandLine::new(&line).expect_err("twice").to_string();
    assert_eq!(error, format!("{}...= is given twice", "é".repeat(16)));
}

#[test]
fn sizes_take_a_suffix_and_a_bare_number_is_bytes() {
    assert_eq!(parse_size("4096"), Some(4096));
    assert_eq!(parse_size("64M"), Some(64 * MIB));
    assert_eq!(parse_size("1g"), Some(1024 * MIB));
    assert_eq!(parse_size("16777216T"), None);
    assert_eq!((parse_size("M"), parse_size(""), parse_size("+4"), parse_size("1.5G")), (None, None, None, None));
    assert_eq!((parse_count("12"), parse_count("12K"), parse_count("-1")), (Some(12), None, None));
}

#[test]
fn notes_of_an_elf_file_are_found_behind_each_other() {
    // One program header at offset 64, its segment right behind: a Xen note, then ours.
    let mut segment = Vec::new();
    for (owner, kind, descriptor) in [
        (&b"Xen\0"[..], 18u32, 0x10_0000u64.to_le_bytes().to_vec()),
        (&b"wideleaf\0\0\0\0"[..], 1, [1u32, 0, 0x10_2000, 0].map(u32::to_le_bytes).concat()),
    ] {
        let owner_bytes = owner.iter().position(|byte| *byte == 0).unwrap() + 1;
        segment.extend([owner_bytes as u32, descriptor.len() as u32, kind].map(u32::to_le_bytes).concat());
        segment.extend(owner);
        segment.extend(descriptor);
    }
    let mut file = vec![0; 64 + 56];
    file[..6].copy_from_slice(b"\x7fELF\x02\x01");
    file[32] = 64; // e_phoff
    file[54] = 56; // e_phentsize
    file[56] = 1; // e_phnum
    file[64] = 4; // p_type = PT_NOTE
    file[72] = 120; // p_offset
    file[96] = segment.len() as u8; // p_filesz
    file.extend(segment);

    assert_eq!(elf_note::notes(&file).count(), 2);
    assert_eq!(elf_note::pvh_entry(&file), Some(0x10_0000));
    assert_eq!(elf_note::direct_entry(&file), Some(DirectNote { version: 1, entry64: 0x10_2000 }));
}

#[test]
fn a_file_of_32_bits_has_notes_too_and_no_direct_entry() {
    // One program header at offset 52, its segment right behind: ours, then a Xen note with an address of 32 bits.
    let segment = [
        &[9u32, 16, 1].map(u32::to_le_bytes).concat()[..],
        b"wideleaf\0\0\0\0",
        &[1u32, 0, 0x10_2000, 0].map(u32::to_le_bytes).concat(),
        &[4u32, 4, 18].map(u32::to_le_bytes).concat(),
        b"Xen\0",
        &0x10_0000u32.to_le_bytes(),
    ]
    .concat();
    let mut file = vec![0; 52 + 32];
    file[..6].copy_from_slice(b"\x7fELF\x01\x01");
    file[28] = 52; // e_phoff
    file[42] = 32; // e_phentsize
    file[44] = 1; // e_phnum
    file[52] = 4; // p_type = PT_NOTE
    file[56] = 84; // p_offset
    file[68] = segment.len() as u8; // p_filesz
    file.extend(segment);

    assert_eq!(elf_note::notes(&file).count(), 2);
    assert_eq!(elf_note::pvh_entry(&file), Some(0x10_0000));
    assert_eq!(elf_note::direct_entry(&file), None);
}
