//! The freestanding guest program: boots, or is started directly, and runs one kernel in ring 3.
//!
//! ```text
//!   PVH loader ──▶ pvh_start (boot.s, 32 bit) ─ long mode, SSE, gates ─ iretq ─▶ pvh_main   ring 3
//!                                                                                  │ start info, page tables, vCPUs
//!   our VMM ──────────────────────────▶ direct_start (boot.s, ring 3) ─▶ direct_main
//!                                                                                  │ boot data
//!                                                                                  ▼
//!                                                              run: clock, arena, registry::run, exit
//! ```
//!
//! | module | what it is |
//! |---|---|
//! | [`pvh`], [`direct`] | the two entries; each ends with a [`run::Machine`] |
//! | [`run`] | the common part: arguments, clock, arena, the kernel, the end |
//! | [`machine`] | instructions: ports (by `out` and `in`, or by system call), CR3, physical memory |
//! | [`console`] | the serial line, panics, the exit |
//! | [`power_button`] | the request for an early end |
//! | [`paging`] | the page tables of the requested size |
//! | [`vcpus`] | starting the other vCPUs (PVH entry) and joining the team |
//! | [`clock`] | the frequency of the time stamp counter |
//! | [`memory_functions`] | `memcpy` and its family, which the compiler expects |
#![no_std]
#![no_main]

mod clock;
mod console;
mod direct;
mod machine;
mod memory_functions;
mod paging;
mod power_button;
mod pvh;
mod run;
mod vcpus;
