//! The answers of CPUID in the guest: the features that KVM supports on this host, with the topology of this VM
//! and, for the direct entry, the frequency of the time stamp counter.

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};
use wideleaf_policies::PageSize;

use super::registers::XCR0_AVX;

/// Basic information and the highest basic leaf.
const LEAF_BASIC: u32 = 0;
/// Family, features, the initial APIC number.
const LEAF_FEATURES: u32 = 1;
/// Topology; index 0 is threads of a core, index 1 cores of a package.
const LEAF_TOPOLOGY: u32 = 0xb;
/// Topology with more levels. Where it has none, a guest reads [`LEAF_TOPOLOGY`] (SDM vol. 2, CPUID).
const LEAF_TOPOLOGY_V2: u32 = 0x1f;
/// State that XSAVE covers; EAX of index 0 has the valid bits of XCR0.
const LEAF_XSAVE: u32 = 0xd;
/// Ratio of time stamp counter and core crystal.
const LEAF_TSC: u32 = 0x15;
/// The hypervisor's signature and highest leaf.
const LEAF_HYPERVISOR: u32 = 0x4000_0000;
/// Time stamp counter and APIC bus in kHz, in the leaf that hypervisors agreed on (VMware, "Mechanisms to determine
/// if software is running in a VMware virtual machine"; also read by FreeBSD under KVM).
const LEAF_HYPERVISOR_TIMING: u32 = 0x4000_0010;
/// Extended features; EDX bit 26 is 1 GiB pages.
const LEAF_EXTENDED_FEATURES: u32 = 0x8000_0001;
/// Leaf of the address widths; EAX: physical (bits 0-7) and linear addresses.
const LEAF_ADDRESS_SIZES: u32 = 0x8000_0008;

/// KVM's local APIC counts nanoseconds (arch/x86/kvm/lapic.h, `APIC_BUS_CYCLE_NS`), and Linux takes the crystal of leaf
/// 0x15 for its clock: so the crystal must be 1 GHz.
const CRYSTAL_HZ: u32 = 1_000_000_000;
/// The ratio's denominator: with it the numerator is the frequency in kHz, so the product is exact.
const TSC_DENOMINATOR: u32 = CRYSTAL_HZ / 1000;

/// Leaf 1, ECX: there is a hypervisor. KVM leaves this bit to the VMM, and without it no guest looks for kvmclock.
const HAS_HYPERVISOR: u32 = 1 << 31;
/// Leaf 1, ECX: the local APIC's timer accepts deadlines. Also left to the VMM, because it needs KVM's interrupt
/// controllers. Linux then need not calibrate the timer, which fails on a busy host.
const HAS_DEADLINE_TIMER: u32 = 1 << 24;

/// The clocks of a guest, beside those that KVM supports everywhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timing {
    /// Frequency of the time stamp counter in kHz for the two timing leaves; `None` leaves them out.
    pub tsc_khz: Option<u32>,
    /// Whether there is a local APIC timer that accepts deadlines.
    pub has_deadline_timer: bool,
}

/// CPUID for one vCPU of `vcpus`, from what KVM supports.
pub fn for_vcpu(supported: &CpuId, vcpu: u32, vcpus: u32, timing: Timing) -> Result<CpuId, vmm_sys_util::fam::Error> {
    let mut cpuid = supported.clone();
    set_topology(&mut cpuid, vcpu, vcpus)?;
    for entry in cpuid.as_mut_slice().iter_mut().filter(|entry| entry.function == LEAF_FEATURES) {
        set_features(entry, vcpu, vcpus, timing);
    }
    if let Some(khz) = timing.tsc_khz {
        set_leaf(&mut cpuid, LEAF_TSC, [TSC_DENOMINATOR, khz, CRYSTAL_HZ, 0])?;
        set_leaf(&mut cpuid, LEAF_HYPERVISOR_TIMING, [khz, CRYSTAL_HZ / 1000, 0, 0])?;
        raise_highest(&mut cpuid, LEAF_BASIC, LEAF_TSC);
        raise_highest(&mut cpuid, LEAF_HYPERVISOR, LEAF_HYPERVISOR_TIMING);
    }
    Ok(cpuid)
}

/// Whether a guest with this CPUID can use pages of this size: 1 GiB pages are an option of the CPU.
pub fn has_page_size(supported: &CpuId, page: PageSize) -> bool {
    page != PageSize::Giant1G || leaf(supported, LEAF_EXTENDED_FEATURES).is_some_and(|entry| entry.edx & 1 << 26 != 0)
}

/// XCR0 that enables the registers of AVX for a guest with this CPUID; `None` without AVX (SDM vol. 1, 13.3 and 14.3).
pub fn avx_xcr0(supported: &CpuId) -> Option<u64> {
    const HAS_XSAVE_AND_AVX: u32 = 1 << 26 | 1 << 28;
    let has_both =
        leaf(supported, LEAF_FEATURES).is_some_and(|entry| entry.ecx & HAS_XSAVE_AND_AVX == HAS_XSAVE_AND_AVX);
    let can_enable = leaf(supported, LEAF_XSAVE).is_some_and(|entry| u64::from(entry.eax) & XCR0_AVX == XCR0_AVX);
    (has_both && can_enable).then_some(XCR0_AVX)
}

/// A leaf of CPUID with sets of features in its registers: number, index, and the bits that are features in EAX to EDX.
type FeatureLeaf = (u32, u32, [u32; 4]);

/// The leaves of features that a guest may rely on (SDM vol. 2, CPUID; AMD APM vol. 3, appendix E; Linux,
/// Documentation/virt/kvm/x86/cpuid.rst).
const FEATURE_LEAVES: [FeatureLeaf; 12] = {
    const ALL: u32 = u32::MAX;
    /// Bits that follow a control register, not the CPU.
    const OSXSAVE: u32 = 1 << 27;
    const OSPKE: u32 = 1 << 4;
    [
        (LEAF_FEATURES, 0, [0, 0, !OSXSAVE, ALL]),
        (0x7, 0, [0, ALL, !OSPKE, ALL]),
        (0x7, 1, [ALL, ALL, ALL, ALL]),
        (0x7, 2, [0, 0, 0, ALL]),
        (LEAF_XSAVE, 0, [ALL, 0, 0, ALL]),
        (LEAF_XSAVE, 1, [ALL, 0, ALL, ALL]),
        (0x4000_0001, 0, [ALL, 0, 0, 0]),
        (LEAF_EXTENDED_FEATURES, 0, [0, 0, ALL, ALL]),
        (0x8000_0007, 0, [0, 0, 0, ALL]),
        (LEAF_ADDRESS_SIZES, 0, [0, ALL, 0, 0]),
        (0x8000_000a, 0, [0, 0, 0, ALL]),
        (0x8000_0021, 0, [ALL, 0, 0, 0]),
    ]
};

/// The properties of a CPU that a guest knows and this host lacks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CpuMissing {
    /// The CPU is of another vendor.
    #[error("the guest runs on a CPU of {saved:?}, and this host has one of {here:?}")]
    Vendor {
        /// Vendor of the guest's CPU.
        saved: String,
        /// Vendor of the host's CPU.
        here: String,
    },
    /// The physical addresses are shorter.
    #[error("the guest has {saved} bits of physical address, and guests of this host have {here}")]
    AddressBits {
        /// Number of address bits of the guest's CPU.
        saved: u32,
        /// Number of address bits that this host gives.
        here: u32,
    },
    /// The CPU lacks features.
    #[error(
        "the guest's CPU has features {bits:#x} in {register} of CPUID leaf {leaf:#x}.{index}, which this host lacks"
    )]
    Features {
        /// Number of the leaf.
        leaf: u32,
        /// Index in the leaf.
        index: u32,
        /// Name of the register.
        register: &'static str,
        /// Bits of the missing features.
        bits: u32,
    },
}

/// Checks that a guest with the CPUID `known` finds everything in `here` that it may rely on.
///
/// # Errors
/// [`CpuMissing`] with the first property that is missing.
pub fn check_covers(here: &CpuId, known: &CpuId) -> Result<(), CpuMissing> {
    let vendors = (vendor(known), vendor(here));
    if vendors.0 != vendors.1 {
        return Err(CpuMissing::Vendor { saved: vendors.0, here: vendors.1 });
    }
    let bits = (physical_address_bits(known), physical_address_bits(here));
    if bits.0 > bits.1 {
        return Err(CpuMissing::AddressBits { saved: bits.0, here: bits.1 });
    }
    for (leaf, index, masks) in FEATURE_LEAVES {
        let (known, here) = (registers(known, leaf, index), registers(here, leaf, index));
        for (n, register) in ["EAX", "EBX", "ECX", "EDX"].into_iter().enumerate() {
            let bits = known[n] & masks[n] & !here[n];
            if bits != 0 {
                return Err(CpuMissing::Features { leaf, index, register, bits });
            }
        }
    }
    Ok(())
}

fn vendor(cpuid: &CpuId) -> String {
    let letters = leaf(cpuid, LEAF_BASIC).map(|entry| [entry.ebx, entry.edx, entry.ecx].map(u32::to_le_bytes).concat());
    String::from_utf8_lossy(&letters.unwrap_or_default()).into_owned()
}

/// EAX to EDX of a leaf; zeroes where it is absent.
fn registers(cpuid: &CpuId, function: u32, index: u32) -> [u32; 4] {
    let mut entries = cpuid.as_slice().iter();
    let found = entries.find(|entry| entry.function == function && entry.index == index);
    found.map_or([0; 4], |entry| [entry.eax, entry.ebx, entry.ecx, entry.edx])
}

/// Number of bits in a physical address of the guest; 36 where the leaf is absent (SDM vol. 2, CPUID).
pub fn physical_address_bits(supported: &CpuId) -> u32 {
    leaf(supported, LEAF_ADDRESS_SIZES).map_or(36, |entry| entry.eax & 0xff)
}

/// Sets the leaf of features: the APIC's number is the vCPU's.
fn set_features(entry: &mut kvm_cpuid_entry2, vcpu: u32, vcpus: u32, timing: Timing) {
    const HYPER_THREADING: u32 = 1 << 28;
    entry.ebx = (entry.ebx & 0xffff) | vcpus << 16 | vcpu << 24;
    entry.ecx |= HAS_HYPERVISOR | if timing.has_deadline_timer { HAS_DEADLINE_TIMER } else { 0 };
    entry.edx = if vcpus > 1 { entry.edx | HYPER_THREADING } else { entry.edx & !HYPER_THREADING };
}

/// Sets one thread per core and all cores in one package. KVM leaves the topology to the VMM: it lists only index 0 of
/// each leaf, with zeroes (`__do_cpuid_func` in arch/x86/kvm/cpuid.c).
fn set_topology(cpuid: &mut CpuId, vcpu: u32, vcpus: u32) -> Result<(), vmm_sys_util::fam::Error> {
    const THREADS_PER_CORE: u32 = 1;
    const LEVEL_THREADS: u32 = 1;
    const LEVEL_CORES: u32 = 2;
    let has_leaf = leaf(cpuid, LEAF_BASIC).is_some_and(|entry| entry.eax >= LEAF_TOPOLOGY);
    cpuid.retain(|entry| !matches!(entry.function, LEAF_TOPOLOGY | LEAF_TOPOLOGY_V2));
    if !has_leaf {
        return Ok(());
    }
    let core_bits = vcpus.next_power_of_two().ilog2();
    let levels = [(0, THREADS_PER_CORE, LEVEL_THREADS), (core_bits, vcpus, LEVEL_CORES), (0, 0, 0)];
    for (index, (eax, ebx, level)) in (0..).zip(levels) {
        let (function, flags) = (LEAF_TOPOLOGY, KVM_CPUID_FLAG_SIGNIFCANT_INDEX);
        let ecx = index | level << 8;
        cpuid.push(kvm_cpuid_entry2 { function, index, flags, eax, ebx, ecx, edx: vcpu, ..Default::default() })?;
    }
    Ok(())
}

fn leaf(cpuid: &CpuId, function: u32) -> Option<&kvm_cpuid_entry2> {
    cpuid.as_slice().iter().find(|entry| entry.function == function)
}

fn set_leaf(cpuid: &mut CpuId, function: u32, [eax, ebx, ecx, edx]: [u32; 4]) -> Result<(), vmm_sys_util::fam::Error> {
    let new = kvm_cpuid_entry2 { function, eax, ebx, ecx, edx, ..Default::default() };
    if let Some(entry) = cpuid.as_mut_slice().iter_mut().find(|entry| entry.function == function) {
        let flags = entry.flags & KVM_CPUID_FLAG_SIGNIFCANT_INDEX;
        *entry = kvm_cpuid_entry2 { flags, ..new };
        return Ok(());
    }
    cpuid.push(new)
}

fn raise_highest(cpuid: &mut CpuId, function: u32, highest: u32) {
    if let Some(entry) = cpuid.as_mut_slice().iter_mut().find(|entry| entry.function == function) {
        entry.eax = entry.eax.max(highest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kvm::KvmSystem;

    fn entry(function: u32, index: u32, [eax, ebx, ecx, edx]: [u32; 4]) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 { function, index, eax, ebx, ecx, edx, ..Default::default() }
    }

    fn supported() -> CpuId {
        CpuId::from_entries(&[
            entry(LEAF_BASIC, 0, [0xd, 0x6874_7541, 0, 0]),
            entry(LEAF_FEATURES, 0, [0x663, 0x0710_0800, 0, 1 << 28]),
            entry(LEAF_TOPOLOGY, 0, [0, 0, 0, 9]),
            entry(LEAF_TOPOLOGY_V2, 0, [0, 0, 0, 9]),
            entry(LEAF_HYPERVISOR, 0, [0x4000_0001, 0x4b4d_564b, 0x564b_4d56, 0x4d]),
            entry(LEAF_EXTENDED_FEATURES, 0, [0, 0, 0, 1 << 29]),
            entry(LEAF_ADDRESS_SIZES, 0, [0x3028, 0, 0, 0]),
        ])
        .unwrap()
    }

    fn registers(cpuid: &CpuId, function: u32, index: u32) -> [u32; 4] {
        let entry = cpuid.as_slice().iter().find(|e| e.function == function && e.index == index).unwrap();
        [entry.eax, entry.ebx, entry.ecx, entry.edx]
    }

    #[test]
    fn each_vcpu_is_a_core_with_its_own_number() {
        let cpuid = for_vcpu(&supported(), 2, 3, Timing::default()).unwrap();
        assert_eq!(registers(&cpuid, LEAF_FEATURES, 0), [0x663, 0x0203_0800, 1 << 31, 1 << 28]);
        assert_eq!(registers(&cpuid, LEAF_TOPOLOGY, 0), [0, 1, 0x100, 2]);
        // Three cores need two bits.
        assert_eq!(registers(&cpuid, LEAF_TOPOLOGY, 1), [2, 3, 0x201, 2]);
        assert_eq!(registers(&cpuid, LEAF_TOPOLOGY, 2), [0, 0, 2, 2]);
        assert!(leaf(&cpuid, LEAF_TOPOLOGY_V2).is_none());
    }

    #[test]
    fn a_host_from_before_the_leaf_has_no_topology() {
        let old = CpuId::from_entries(&[entry(LEAF_BASIC, 0, [0xa, 0, 0, 0])]).unwrap();
        let timing = Timing { tsc_khz: Some(1), ..Timing::default() };
        assert!(leaf(&for_vcpu(&old, 0, 2, timing).unwrap(), LEAF_TOPOLOGY).is_none());
    }

    #[test]
    fn two_vcpus_of_this_kvm_are_two_cores_of_one_package() {
        let Some(system) = KvmSystem::open_or_skip() else { return };
        let cpuid = for_vcpu(&system.supported_cpuid().unwrap(), 1, 2, Timing::default()).unwrap();
        if leaf(&cpuid, LEAF_BASIC).unwrap().eax < LEAF_TOPOLOGY {
            return println!("skipped: this CPU has no leaf of the topology");
        }
        let topology: Vec<_> = cpuid.as_slice().iter().filter(|entry| entry.function == LEAF_TOPOLOGY).collect();
        assert!(topology.iter().all(|entry| entry.edx == 1 && entry.flags == KVM_CPUID_FLAG_SIGNIFCANT_INDEX));
        assert_eq!([0, 1, 2].map(|index: usize| topology[index].ebx), [1, 2, 0]);
    }

    #[test]
    fn avx_is_enabled_only_where_cpu_and_kvm_have_it() {
        const XSAVE: u32 = 1 << 26;
        const AVX: u32 = 1 << 28;
        let with = |features, states| {
            let entries = [entry(LEAF_FEATURES, 0, [0, 0, features, 0]), entry(LEAF_XSAVE, 0, [states, 0, 0, 0])];
            avx_xcr0(&CpuId::from_entries(&entries).unwrap())
        };
        assert_eq!(with(XSAVE | AVX, 0x2e7), Some(7));
        assert_eq!([with(XSAVE, 7), with(AVX, 7), with(XSAVE | AVX, 3), avx_xcr0(&supported())], [None; 4]);
    }

    #[test]
    fn a_single_vcpu_has_no_siblings() {
        let cpuid = for_vcpu(&supported(), 0, 1, Timing::default()).unwrap();
        assert_eq!(registers(&cpuid, LEAF_FEATURES, 0)[3], 0);
        assert_eq!(registers(&cpuid, LEAF_TOPOLOGY, 1)[0], 0);
    }

    #[test]
    fn the_timing_leaves_give_the_exact_frequency_and_can_be_found() {
        let khz = 2_899_999;
        let cpuid = for_vcpu(&supported(), 0, 1, Timing { tsc_khz: Some(khz), ..Timing::default() }).unwrap();
        let [denominator, numerator, crystal, _] = registers(&cpuid, LEAF_TSC, 0);
        let hz = u64::from(crystal) * u64::from(numerator) / u64::from(denominator);
        assert_eq!(hz, 2_899_999_000);
        assert_eq!(registers(&cpuid, LEAF_HYPERVISOR_TIMING, 0)[..2], [khz, 1_000_000]);
        assert_eq!(registers(&cpuid, LEAF_BASIC, 0)[0], LEAF_TSC);
        assert_eq!(registers(&cpuid, LEAF_HYPERVISOR, 0)[0], LEAF_HYPERVISOR_TIMING);
    }

    #[test]
    fn without_a_frequency_the_timing_leaves_are_absent() {
        let cpuid = for_vcpu(&supported(), 0, 1, Timing::default()).unwrap();
        assert!(leaf(&cpuid, LEAF_TSC).is_none());
        assert_eq!(registers(&cpuid, LEAF_BASIC, 0)[0], 0xd);
    }

    #[test]
    fn deadlines_are_offered_only_where_there_is_a_timer() {
        let ecx = |timing| registers(&for_vcpu(&supported(), 0, 1, timing).unwrap(), LEAF_FEATURES, 0)[2];
        assert_eq!(ecx(Timing::default()) & HAS_DEADLINE_TIMER, 0);
        let with_timer = Timing { has_deadline_timer: true, ..Timing::default() };
        assert_ne!(ecx(with_timer) & HAS_DEADLINE_TIMER, 0);
    }

    #[test]
    fn giant_pages_are_detected_by_their_bit() {
        assert!(has_page_size(&supported(), PageSize::Huge2M));
        assert!(!has_page_size(&supported(), PageSize::Giant1G));
        let giant = CpuId::from_entries(&[entry(LEAF_EXTENDED_FEATURES, 0, [0, 0, 0, 1 << 26])]).unwrap();
        assert!(has_page_size(&giant, PageSize::Giant1G));
        assert_eq!(physical_address_bits(&supported()), 0x28);
    }

    #[test]
    fn a_host_covers_a_guest_that_knows_no_more_than_it_has() {
        let here = for_vcpu(&supported(), 1, 2, Timing::default()).unwrap();
        let with = |function: u32, change: &dyn Fn(&mut kvm_cpuid_entry2)| {
            let mut known = here.clone();
            known.as_mut_slice().iter_mut().filter(|entry| entry.function == function).for_each(change);
            check_covers(&here, &known)
        };
        assert_eq!(check_covers(&here, &here), Ok(()));
        assert_eq!(with(LEAF_FEATURES, &|entry| entry.edx = 0), Ok(()), "a guest that knows less");
        assert_eq!(with(LEAF_FEATURES, &|entry| entry.ecx |= 1 << 27), Ok(()), "OSXSAVE follows CR4");
        let missing = CpuMissing::Features { leaf: 1, index: 0, register: "EDX", bits: 1 << 25 };
        assert_eq!(with(LEAF_FEATURES, &|entry| entry.edx |= 1 << 25), Err(missing));
        let short = CpuMissing::AddressBits { saved: 0x29, here: 0x28 };
        assert_eq!(with(LEAF_ADDRESS_SIZES, &|entry| entry.eax += 1), Err(short));
        assert!(matches!(with(LEAF_BASIC, &|entry| entry.ebx = 0), Err(CpuMissing::Vendor { .. })));
        let mut known = here.clone();
        known.push(entry(7, 0, [0, 1 << 5, 0, 0])).unwrap();
        let error = check_covers(&here, &known).unwrap_err().to_string();
        assert!(error.contains("features 0x20 in EBX of CPUID leaf 0x7.0"), "{error}");
    }
}
