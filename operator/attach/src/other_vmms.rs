//! VMMs beside QEMU and ours: their names for their guests, and the places of RAM in their processes. Facts from
//! their sources of 2025: Firecracker (`vstate/memory.rs`, `arch/x86_64`), Cloud Hypervisor (`memory_manager.rs`,
//! `arch/src/x86_64/layout.rs`) and crosvm (`vm_memory`, `crosvm/cmdline.rs`).
//!
//! ```text
//!                      name                     RAM                               guest-physical
//!   firecracker        --id                     anonymous, or memfd guest_mem     0 - 3 GiB (once 3.25), 4 GiB -
//!   cloud-hypervisor   --platform, api socket   anonymous, or memfd ch_ram        0 - 3 GiB, 4 GiB -
//!   crosvm             --name, control socket   memfd crosvm_guest                0 - at most 4 GiB, 4 GiB -
//! ```
//!
//! None of them is asked: their sockets serve commands that change a guest as well. Any process may have any name and
//! arguments, so that a name here is a label, as it is for QEMU.

use std::path::Path;

use wideleaf_control::view::Vmm;
use wideleaf_memory::RamRange;
use wideleaf_policies::units::{gib, mib};
use wideleaf_policies::{Bytes, Gpa, GpaRange, Hva};

use crate::command_line::{CommandLine, Returns};
use crate::mapping::Mapping;

/// Name that Firecracker has for a guest without one.
const FIRECRACKERS_DEFAULT: &str = "anonymous-instance";

/// Parts of a socket's path that name no guest: `clh-api.sock` is that of every guest of Kata Containers.
const GENERAL_WORDS: [&str; 14] = [
    "api",
    "ch",
    "clh",
    "clh-api",
    "cloud-hypervisor",
    "control",
    "crosvm",
    "root",
    "run",
    "socket",
    "tmp",
    "var",
    "vm",
    "vmm",
];

/// End of the RAM below 4 GiB.
const LOW_END: Bytes = gib(3);

/// The same for older versions of Firecracker, before it had PCI.
const LOW_END_OF_OLD_FIRECRACKER: Bytes = mib(3328);

/// Smallest anonymous mapping that may be the RAM above 4 GiB. A thread's stack has 2 MiB.
const HIGH_MIN: Bytes = mib(64);

/// The VMM with this program name, of those here.
pub(crate) fn vmm(program: &str) -> Option<Vmm> {
    match program {
        "firecracker" => Some(Vmm::Firecracker),
        "cloud-hypervisor" => Some(Vmm::CloudHypervisor),
        "crosvm" => Some(Vmm::Crosvm),
        _ => None,
    }
}

/// The parts of the command line that matter here.
pub(crate) fn command_line(vmm: Vmm, arguments: &[String]) -> CommandLine {
    let none = unknown();
    match vmm {
        Vmm::Firecracker => CommandLine { name: of_firecracker(arguments), ..none },
        Vmm::CloudHypervisor => of_cloud_hypervisor(arguments),
        Vmm::Crosvm => of_crosvm(arguments),
        Vmm::Qemu | Vmm::Wideleaf | Vmm::Other => none,
    }
}

/// A command line that says nothing, not even the size of the RAM.
fn unknown() -> CommandLine {
    CommandLine { ram: Bytes::ZERO, ..CommandLine::default() }
}

/// A jailer passes `--id` as well.
fn of_firecracker(arguments: &[String]) -> Option<String> {
    option(arguments, &["--id"]).filter(|id| *id != FIRECRACKERS_DEFAULT && !id.is_empty()).map(str::to_owned)
}

fn of_cloud_hypervisor(arguments: &[String]) -> CommandLine {
    let platform = |key| option(arguments, &["--platform"]).and_then(|text| setting(text, key)).map(str::to_owned);
    let socket = option(arguments, &["--api-socket"]);
    let of_socket = || named_by(setting(socket?, "path").unwrap_or(socket?));
    let is_on = |key| platform(key).is_some_and(|value| value == "on");
    let balloon = option(arguments, &["--balloon"]);
    let memory = option(arguments, &["--memory"]);
    let has = |text: Option<&str>, key, value| text.and_then(|text| setting(text, key)) == Some(value);
    CommandLine {
        name: platform("serial_number").or_else(of_socket),
        uuid: platform("uuid"),
        ram: memory.and_then(|text| setting(text, "size")).and_then(bytes_of).unwrap_or(Bytes::ZERO),
        is_encrypted: is_on("tdx") || is_on("sev_snp"),
        returns: Returns {
            balloon: balloon.is_some(),
            free_page_reporting: has(balloon, "free_page_reporting", "on"),
            virtio_mem: has(memory, "hotplug_method", "virtio-mem"),
        },
        ..CommandLine::default()
    }
}

/// It has a balloon unless that is switched off.
fn of_crosvm(arguments: &[String]) -> CommandLine {
    let of_socket = || named_by(option(arguments, &["-s", "--socket"])?);
    let has = |flag: &str| arguments.iter().any(|argument| argument == flag);
    let is_protected = arguments.iter().any(|argument| argument.starts_with("--protected-vm"));
    CommandLine {
        name: option(arguments, &["--name"]).map(str::to_owned).or_else(of_socket),
        is_encrypted: is_protected,
        returns: Returns {
            balloon: !has("--no-balloon"),
            free_page_reporting: has("--balloon-page-reporting"),
            virtio_mem: false,
        },
        ..unknown()
    }
}

/// The value of the first of these options, as `--option value` or `--option=value`.
fn option<'a>(arguments: &'a [String], names: &[&str]) -> Option<&'a str> {
    arguments.iter().enumerate().find_map(|(index, argument)| {
        names.iter().find_map(|name| match argument.strip_prefix(name)? {
            "" => arguments.get(index + 1).map(String::as_str),
            value => value.strip_prefix('='),
        })
    })
}

/// The value in `key=value,…`.
fn setting<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    text.split(',').find_map(|setting| setting.strip_prefix(key)?.strip_prefix('='))
}

/// A size as Cloud Hypervisor writes it: bytes, or `K`, `M`, `G`, `T`.
fn bytes_of(text: &str) -> Option<Bytes> {
    let digits = text.trim_end_matches(['K', 'M', 'G', 'T']);
    let shift = match &text[digits.len()..] {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift).map(Bytes::new)
}

/// The last part of a socket's path that is not a general word: of `/run/vc/vm/ID/clh-api.sock` the id.
fn named_by(socket: &str) -> Option<String> {
    let stem = Path::new(socket).with_extension("");
    let parts = stem.iter().rev().filter_map(|part| part.to_str());
    let mut names = parts.filter(|part| *part != "/" && !GENERAL_WORDS.contains(part));
    names.next().map(str::to_owned)
}

/// Likely places of the RAM, ascending. `ram`: size of all of it, zero where the command line does not have it.
pub(crate) fn guess(vmm: Vmm, ram: Bytes, mappings: &[Mapping]) -> Vec<(String, RamRange)> {
    let memfd = match vmm {
        Vmm::Firecracker => "/memfd:guest_mem",
        Vmm::CloudHypervisor => "/memfd:ch_ram",
        _ => "/memfd:crosvm_guest",
    };
    let name = memfd.trim_start_matches("/memfd:");
    let is_file = |mapping: &&Mapping| mapping.path.as_deref().is_some_and(|path| is_memfd(path, memfd));
    let mut parts: Vec<&Mapping> = mappings.iter().filter(|mapping| mapping.is_writable).filter(is_file).collect();
    // One file has its parts in the order of guest-physical addresses. Of several files the first is mapped highest.
    parts.sort_by_key(|mapping| (mapping.offset, std::cmp::Reverse(mapping.start)));
    if vmm != Vmm::CloudHypervisor {
        // A second mapping of the same memory.
        parts.dedup_by_key(|mapping| mapping.offset);
    }
    if parts.is_empty() {
        let places = lay_out(anonymous(ram, mappings));
        return places.into_iter().map(|range| ("ram".to_owned(), range)).collect();
    }
    let places = lay_out(parts.into_iter().map(|part| (part.start, part.bytes)).collect());
    places.into_iter().map(|range| (name.to_owned(), range)).collect()
}

/// `/memfd:ch_ram (deleted)`, and no longer name.
fn is_memfd(path: &str, memfd: &str) -> bool {
    path.strip_prefix(memfd).is_some_and(|rest| rest.is_empty() || rest.starts_with(' '))
}

/// Parts of RAM that has no name, that below 4 GiB first. A guest that was restored from a file has its RAM in
/// private mappings of that.
fn anonymous(ram: Bytes, mappings: &[Mapping]) -> Vec<(Hva, Bytes)> {
    let mut likely: Vec<_> = mappings
        .iter()
        .filter(|mapping| mapping.is_writable && mapping.is_private)
        .map(|mapping| (mapping.start, mapping.bytes))
        .collect();
    likely.sort_by_key(|(start, bytes)| std::cmp::Reverse((*bytes, *start)));
    let of = |wanted: Bytes| likely.iter().copied().find(|(_, bytes)| *bytes == wanted);
    let Some(largest) = likely.first().copied() else { return Vec::new() };
    let [low, high] = [ram.min(LOW_END), ram.saturating_sub(LOW_END)];
    let is_known = ram > Bytes::ZERO;
    let parts = match (of(low), of(high)) {
        (Some(low), _) if is_known && high == Bytes::ZERO => return vec![low],
        (Some(low), Some(high)) if is_known => return vec![low, high],
        _ => [LOW_END, LOW_END_OF_OLD_FIRECRACKER].into_iter().find_map(of),
    };
    let Some(low) = parts else { return halves_of(largest) };
    let other = likely.iter().copied().find(|part| *part != low && part.1 >= HIGH_MIN);
    [Some(low), other].into_iter().flatten().collect()
}

/// The two parts of one mapping: the kernel maps the second part below the first, and joins them.
fn halves_of((start, bytes): (Hva, Bytes)) -> Vec<(Hva, Bytes)> {
    match bytes.saturating_sub(LOW_END) {
        Bytes::ZERO => vec![(start, bytes)],
        high => vec![(start + high, LOW_END), (start, high)],
    }
}

/// Parts one after the other from address 0, with the hole below 4 GiB left out.
fn lay_out(parts: Vec<(Hva, Bytes)>) -> Vec<RamRange> {
    let mut at = Gpa::new(0);
    let above = Gpa::new(gib(4).get());
    let mut placed = Vec::with_capacity(parts.len());
    for (hva, bytes) in parts {
        let end_below = Gpa::new(LOW_END.get());
        let fits_below = at < above && bytes <= gib(4) && (at == Gpa::new(0) || at + bytes <= end_below);
        if at < above && !fits_below {
            at = above;
        }
        let Some(gpa) = GpaRange::new(at, bytes) else { break };
        placed.push(RamRange { gpa, hva });
        at = gpa.end();
    }
    placed
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn words(line: &str) -> Vec<String> {
        line.split_whitespace().map(str::to_owned).collect()
    }

    fn name(vmm: Vmm, line: &str) -> Option<String> {
        command_line(vmm, &words(line)).name
    }

    #[test]
    fn a_guest_has_the_name_that_its_vmm_was_given() {
        for (vmm, line, expected) in [
            (Vmm::Firecracker, "firecracker --api-sock /run/f.sock --id vm-7", Some("vm-7")),
            (Vmm::Firecracker, "/firecracker --id=vm-8 --start-time-us 7", Some("vm-8")),
            (Vmm::Firecracker, "firecracker --id anonymous-instance", None),
            (Vmm::Firecracker, "firecracker --id", None),
            (Vmm::CloudHypervisor, "cloud-hypervisor --api-socket /run/vc/vm/ab12/clh-api.sock", Some("ab12")),
            (Vmm::CloudHypervisor, "cloud-hypervisor --api-socket path=/run/web.sock --cpus boot=1", Some("web")),
            (Vmm::CloudHypervisor, "cloud-hypervisor --api-socket /tmp/cloud-hypervisor.sock", None),
            (Vmm::CloudHypervisor, "cloud-hypervisor --platform uuid=u-1,serial_number=db", Some("db")),
            (Vmm::Crosvm, "crosvm run --name arcvm -s /run/vm/vm.sock bzImage", Some("arcvm")),
            (Vmm::Crosvm, "crosvm run --socket=/run/vm/borealis/crosvm.sock bzImage", Some("borealis")),
            (Vmm::Crosvm, "crosvm run bzImage", None),
            (Vmm::Other, "vmm --id 1 --name 2", None),
        ] {
            assert_eq!(name(vmm, line).as_deref(), expected, "{line}");
        }
        let line = words("cloud-hypervisor --platform uuid=u-1,tdx=on --memory size=4G,shared=on");
        let line = command_line(Vmm::CloudHypervisor, &line);
        assert_eq!((line.uuid.as_deref(), line.ram, line.is_encrypted), (Some("u-1"), gib(4), true));
    }

    #[test]
    fn devices_by_which_a_guest_gives_memory_back_are_seen() {
        let returns = |vmm, line| command_line(vmm, &words(line)).returns;
        let with = |balloon, free_page_reporting, virtio_mem| Returns { balloon, free_page_reporting, virtio_mem };
        assert_eq!(returns(Vmm::CloudHypervisor, "cloud-hypervisor --memory size=1G"), with(false, false, false));
        let all = "ch --memory size=1G,hotplug_method=virtio-mem --balloon size=0,free_page_reporting=on";
        assert_eq!(returns(Vmm::CloudHypervisor, all), with(true, true, true));
        assert_eq!(returns(Vmm::Crosvm, "crosvm run"), with(true, false, false), "unless it is switched off");
        assert_eq!(returns(Vmm::Crosvm, "crosvm run --no-balloon"), with(false, false, false));
    }

    fn mapping(start: u64, bytes: Bytes, offset: Bytes, path: Option<&str>) -> Mapping {
        Mapping {
            start: Hva::new(start),
            bytes,
            offset,
            is_writable: true,
            is_private: path.is_none(),
            path: path.map(str::to_owned),
            file_system: None,
            kernel_page: wideleaf_policies::PageSize::Base4K.bytes(),
            is_kept_small: false,
            is_watched: false,
        }
    }

    /// Guest-physical address in GiB, size in GiB and address in the process of each part.
    fn places(vmm: Vmm, ram: Bytes, mappings: &[Mapping]) -> Vec<(u64, u64, u64)> {
        let guessed = guess(vmm, ram, mappings);
        let place = |range: &RamRange| (range.gpa.start().get() >> 30, range.gpa.bytes().get() >> 30, range.hva.get());
        guessed.iter().map(|(_, range)| place(range)).collect()
    }

    const BASE: u64 = 0x7000_0000_0000;

    #[test]
    fn ram_in_a_memfd_is_known_by_its_name_and_laid_out_by_its_offsets() {
        let crosvm = Some("/memfd:crosvm_guest (deleted)");
        let mappings = [
            mapping(BASE, gib(5), gib(3), crosvm),
            mapping(BASE + (8 << 30), gib(3), Bytes::ZERO, crosvm),
            mapping(BASE + (16 << 30), gib(9), Bytes::ZERO, Some("/memfd:crosvm_guest_other (deleted)")),
            mapping(BASE + (32 << 30), gib(9), Bytes::ZERO, None),
        ];
        let expected = [(0, 3, BASE + (8 << 30)), (4, 5, BASE)];
        assert_eq!(places(Vmm::Crosvm, Bytes::ZERO, &mappings), expected);
        let twice = [mappings[1].clone(), mapping(BASE, gib(3), Bytes::ZERO, crosvm)];
        assert_eq!(places(Vmm::Crosvm, Bytes::ZERO, &twice), expected[..1]);
        // Each zone of Cloud Hypervisor has a file of its own.
        let zone = |start, bytes| mapping(start, bytes, Bytes::ZERO, Some("/memfd:ch_ram (deleted)"));
        let mappings = [zone(BASE, gib(2)), zone(BASE + (4 << 30), gib(1)), zone(BASE + (8 << 30), gib(1))];
        let expected = [(0, 1, BASE + (8 << 30)), (1, 1, BASE + (4 << 30)), (4, 2, BASE)];
        assert_eq!(places(Vmm::CloudHypervisor, Bytes::ZERO, &mappings), expected);
    }

    #[test]
    fn anonymous_ram_is_the_largest_mapping_or_the_two_on_both_sides_of_the_hole() {
        let anonymous = |start, bytes| mapping(start, bytes, Bytes::ZERO, None);
        let stack = anonymous(BASE + (60 << 30), mib(2));
        let small = [anonymous(BASE, gib(1)), stack.clone()];
        assert_eq!(places(Vmm::Firecracker, Bytes::ZERO, &small), [(0, 1, BASE)]);
        let three = [anonymous(BASE, gib(3)), stack.clone()];
        assert_eq!(places(Vmm::Firecracker, Bytes::ZERO, &three), [(0, 3, BASE)], "a stack is no RAM");
        let two = [anonymous(BASE, gib(5)), stack.clone(), anonymous(BASE + (32 << 30), gib(3))];
        let expected = [(0, 3, BASE + (32 << 30)), (4, 5, BASE)];
        assert_eq!(places(Vmm::Firecracker, Bytes::ZERO, &two), expected);
        assert_eq!(places(Vmm::CloudHypervisor, gib(8), &two), expected);
        // Joined by the kernel: the part above 4 GiB is mapped below the other one.
        let joined = [anonymous(BASE, gib(8)), stack];
        let expected = [(0, 3, BASE + (5 << 30)), (4, 5, BASE)];
        assert_eq!(places(Vmm::Firecracker, Bytes::ZERO, &joined), expected);
        assert!(places(Vmm::Firecracker, Bytes::ZERO, &[]).is_empty());
    }

    #[test]
    fn sizes_and_names_that_make_no_sense_are_left_out() {
        for text in ["", "G", "1.5G", "1GG", "99999999999999999999", "18446744073709551615T", "é"] {
            assert_eq!(bytes_of(text), None, "{text}");
        }
        assert_eq!(bytes_of("512M"), Some(mib(512)));
        for socket in ["", "/", "..", "/run/vm/api.sock"] {
            assert!(named_by(socket).is_none_or(|name| !name.is_empty() && !name.contains('/')), "{socket}");
        }
    }

    proptest! {
        #[test]
        fn any_arguments_and_mappings_give_places_that_ascend(
            words in prop::collection::vec(
                "--id|--name|--memory|--platform|size=[0-9]{1,20}[KMGT]?|uuid=.{0,5}|.{0,20}",
                0..8,
            ),
            sizes in prop::collection::vec((0_u64..1 << 40, any::<bool>()), 0..6),
        ) {
            for vmm in [Vmm::Firecracker, Vmm::CloudHypervisor, Vmm::Crosvm] {
                let line = command_line(vmm, &words);
                let of = |(index, (pages, is_named)): (usize, &(u64, bool))| {
                    let path = is_named.then_some("/memfd:ch_ram (deleted)");
                    mapping(BASE + index as u64 * 4096, Bytes::new(pages << 12), Bytes::ZERO, path)
                };
                let mappings: Vec<_> = sizes.iter().enumerate().map(of).collect();
                let placed = guess(vmm, line.ram, &mappings);
                prop_assert!(placed.windows(2).all(|pair| pair[0].1.gpa.end() <= pair[1].1.gpa.start()));
            }
        }
    }
}
