//! Paging mode of a vCPU, from the registers that QEMU prints (`info registers`). In system management mode a vCPU has
//! the firmware's tables or none, so it has no mode.

use wideleaf_memory::second_level::{ControlRegisters, PagingMode};

/// Parses one vCPU's registers; `None` where a register that matters is missing or malformed.
pub fn paging_mode(text: &str) -> Option<PagingMode> {
    let register = |name: &str| {
        let value = text.split_whitespace().find_map(|word| word.strip_prefix(name))?;
        u64::from_str_radix(value, 16).ok()
    };
    let (cr0, cr3, cr4, efer) = (register("CR0=")?, register("CR3=")?, register("CR4=")?, register("EFER=")?);
    let is_in_smm = register("SMM=")? != 0;
    Some(if is_in_smm { PagingMode::Off } else { PagingMode::of(ControlRegisters { cr0, cr3, cr4, efer }) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use wideleaf_memory::second_level::TableLevels;

    /// Output of QEMU 7.2 for a vCPU at work in 64-bit mode.
    const LONG: &str = "\r\nCPU#0\r
RAX=00000000005bb41e RBX=00000000001e7460 RCX=00000000000000f0 RDX=f741bfb79231f1c1\r
RIP=0000000000195da4 RFL=00000087 [--S--PC] CPL=3 II=0 A20=1 SMM=0 HLT=0\r
CS =001b 0000000000000000 ffffffff 00a0fb00 DPL=3 CS64 [-RA]\r
GDT=     00000000001d7000 0000012f\r
CR0=80010033 CR2=0000000000000000 CR3=00000000002ee000 CR4=00000620\r
DR6=00000000ffff0ff0 DR7=0000000000000400\r
EFER=0000000000000500\r
FCW=037f FSW=0000 [ST=0] FTW=00 MXCSR=00001f80\r\n";

    /// Output for a vCPU that waits to be started.
    const WAITING: &str = "\r\nCPU#1\r
EAX=00000000 EBX=00000000 ECX=00000000 EDX=00a10f11\r
EIP=0000fff0 EFL=00000002 [-------] CPL=0 II=0 A20=1 SMM=0 HLT=0\r
CS =f000 ffff0000 0000ffff 00009b00\r
CR0=60000010 CR2=00000000 CR3=00000000 CR4=00000000\r
DR6=00000000ffff0ff0 DR7=0000000000000400\r
EFER=0000000000000000\r\n";

    #[test]
    fn a_vcpu_in_64_bit_mode_has_a_root_and_one_that_waits_has_none() {
        let long = PagingMode::Long { root: 0x2e_e000, levels: TableLevels::Four };
        assert_eq!(paging_mode(LONG), Some(long));
        assert_eq!(paging_mode(WAITING), Some(PagingMode::Off));
    }

    #[test]
    fn the_registers_that_choose_a_mode_are_read() {
        let with = |cr4: &str, efer: &str| {
            paging_mode(&LONG.replace("CR4=00000620", cr4).replace("EFER=0000000000000500", efer))
        };
        let five = PagingMode::Long { root: 0x2e_e000, levels: TableLevels::Five };
        assert_eq!(with("CR4=00001620", "EFER=0000000000000d01"), Some(five));
        assert_eq!(with("CR4=00000020", "EFER=0000000000000000"), Some(PagingMode::Pae));
        assert_eq!(with("CR4=00000010", "EFER=0000000000000100"), Some(PagingMode::Legacy));
    }

    #[test]
    fn a_vcpu_in_system_management_mode_has_no_root() {
        assert_eq!(paging_mode(&LONG.replace("SMM=0", "SMM=1")), Some(PagingMode::Off));
    }

    #[test]
    fn text_without_a_register_that_matters_is_refused() {
        for missing in ["CR0=", "CR3=", "CR4=", "EFER=", "SMM="] {
            assert_eq!(paging_mode(&LONG.replace(missing, "X=")), None, "{missing}");
        }
        assert_eq!(paging_mode(&LONG.replace("CR3=00000000002ee000", "CR3=2ee000h")), None);
    }

    proptest! {
        #[test]
        fn no_text_causes_a_panic(text in "(CR0=|CR3=|CR4=|EFER=|SMM=|[0-9a-f]{0,20}|\\PC| |\n){0,60}") {
            let _ = paging_mode(&text);
        }
    }
}
