//! The command line of wideleaf, as a library. `main` parses and prints; everything else is here, so that tests and
//! benches can call what a person would type.
//!
//! ```text
//!   args ──▶ run ──▶ wideleaf-run (one guest or native kernel under the manager) ▶ report ─▶ table | JSON
//!            kernels ▶ the table of built-in kernels ───────────────────────────▶ table | JSON
//!            demo ─▶ several `wideleaf run`, alternating ───────────────────────▶ report
//!            tlbcost ▶ several `wideleaf run latency` until they agree ─────────▶ table | JSON | auto's table
//!            hook ─▶ what libvirt runs when a guest starts or ends; reports it to wideleafd
//!            pool ─▶ the hugetlb pools: list, reserve, release ─────────────────▶ table | JSON
//!            doctor ▶ capabilities, and with --mappings: small guests, counters against expectation
//!            list, info, explain, top ▶ vm_source (the daemon, or the processes) ▶ table | JSON | screen
//!            set, attach, detach, reload ▶ the daemon;  vm ▶ one VM's control socket
//!            completions, man ▶ shell completions and manual pages
//! ```

pub mod args;
pub mod attach;
pub mod child;
pub mod demo;
pub mod doctor;
pub mod guardian;
pub mod guests;
pub mod hook;
pub mod kernels;
pub mod limits;
pub mod manual;
#[path = "../../packaging/manual_page.rs"]
mod manual_page;
pub mod moved_commands;
pub mod options;
pub mod output;
pub mod policy_arg;
pub mod pool;
pub mod program;
pub mod progress;
pub mod report;
pub mod run;
pub mod stderr;
pub mod table;
pub mod tlbcost;
pub mod top;
pub mod vm;
pub mod vm_source;
