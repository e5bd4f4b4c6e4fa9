//! Paging mode of a vCPU, from its control registers.
//!
//! ```text
//!   CR0.PG = 0 ───────────────────────────▶ nothing: it starts, or waits to be started
//!   CR0.PG = 1 ─┬─ EFER.LMA = 1 ─┬─ CR4.LA57 = 0 ─▶ four levels from CR3
//!               │                └─ CR4.LA57 = 1 ─▶ five levels from CR3
//!               └─ EFER.LMA = 0 ─┬─ CR4.PAE = 1 ──▶ 32-bit, three levels: not followed
//!                                └─ CR4.PAE = 0 ──▶ 32-bit, two levels: not followed
//! ```
//!
//! SDM vol. 3, 4.1.1.

/// Control registers of a vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControlRegisters {
    /// Value of CR0.
    pub cr0: u64,
    /// Value of CR3.
    pub cr3: u64,
    /// Value of CR4.
    pub cr4: u64,
    /// Value of the extended feature enable register.
    pub efer: u64,
}

/// Number of levels of a guest's tables: five if CR4.LA57 is set (SDM vol. 3, 4.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableLevels {
    /// Four levels, 48 bits of address.
    Four,
    /// Five levels, 57 bits of address.
    Five,
}

/// Paging mode of a vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PagingMode {
    /// Paging is off for now.
    Off,
    /// Paging in 64-bit mode.
    Long {
        /// Value of CR3.
        root: u64,
        /// Number of levels.
        levels: TableLevels,
    },
    /// Paging in 32-bit mode with physical address extension.
    Pae,
    /// Paging in 32-bit mode.
    Legacy,
}

const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const CR4_LA57: u64 = 1 << 12;
const EFER_LMA: u64 = 1 << 10;

impl PagingMode {
    /// Mode of a vCPU with these registers.
    pub const fn of(registers: ControlRegisters) -> PagingMode {
        let ControlRegisters { cr0, cr3, cr4, efer } = registers;
        if cr0 & CR0_PG == 0 {
            PagingMode::Off
        } else if efer & EFER_LMA != 0 {
            let levels = if cr4 & CR4_LA57 == 0 { TableLevels::Four } else { TableLevels::Five };
            PagingMode::Long { root: cr3, levels }
        } else if cr4 & CR4_PAE != 0 {
            PagingMode::Pae
        } else {
            PagingMode::Legacy
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_paging_mode_is_recognised_by_its_bits() {
        let with = |cr0, cr4, efer| PagingMode::of(ControlRegisters { cr0, cr3: 0x2e_e000, cr4, efer });
        let long = |levels| PagingMode::Long { root: 0x2e_e000, levels };
        assert_eq!(with(0x8001_0033, 0x620, 0x500), long(TableLevels::Four));
        assert_eq!(with(0x8001_0033, 0x1620, 0xd01), long(TableLevels::Five));
        assert_eq!(with(0x8001_0033, 0x20, 0), PagingMode::Pae);
        assert_eq!(with(0x8001_0033, 0x10, 0x100), PagingMode::Legacy);
        assert_eq!(with(0x6000_0010, 0x620, 0x500), PagingMode::Off);
    }
}
