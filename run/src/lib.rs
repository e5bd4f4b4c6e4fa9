//! One run: a guest, or a native kernel, under the manager. The command line, the tests and the benches use it alike;
//! it parses no arguments and prints nothing.
//!
//! ```text
//!   RunSpec ──▶ engine: Prepared ──▶ Running ──▶ Over ──▶ RunReport
//!                          │            ├─ session: the guest's lines, and counters where the guest marks them
//!                          │            ├─ control socket, wideleafd, policy switch, restarts
//!                          │            └─ FrontEnd: lines, progress and a console, for the program that embeds it
//!                          └─ devices, sandbox, RAM
//! ```

mod control_socket;
pub mod devices;
pub mod engine;
pub mod failure;
pub mod front_end;
mod guarantee;
pub mod guardian;
pub mod guards;
pub mod guest;
pub mod interrupts;
pub mod kernel;
mod live_report;
pub mod mappings;
pub mod migration;
pub mod native;
pub mod numa;
pub mod outcome;
pub mod output_file;
mod past_saves;
pub mod policy_switch;
pub mod queued;
mod ram;
mod recording;
mod registered;
mod remapping;
pub mod report;
mod restarts;
pub mod same_file;
pub mod sandboxed;
mod save_thread;
pub mod session;
pub mod setup;
pub mod snapshot;
pub mod spec;
pub mod suggest;
mod summary;
pub mod text;
pub mod undo;
mod users_pause;
mod walks;

pub use wideleaf_measure::environment;
