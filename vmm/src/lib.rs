//! wideleaf-vmm
