//! `wideleaf vm SOCKET migrate ADDRESS`: connects to the target, and passes the connection to the VM.
//!
//! ```text
//!   this process                              the VM                           wideleaf run --incoming
//!   connects ────────────────────────────────────────────────────────────────▶ accepts
//!   passes the connection ──request─────────▶ sends itself ──────────────────▶ receives
//!   shows the progress    ◀──status──────────
//!   Ctrl-C: closes the pipe ────────────────▶ cancels, goes on               ─▶ ends
//!   shows the result      ◀──migrated────────  ends                          ─▶ runs
//! ```

use std::num::NonZeroU64;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::time::Duration;

use clap::Args;
use wideleaf_control::vm::{PostCopyFrom, VmAnswer, VmRequest};
use wideleaf_policies::Bytes;
use wideleaf_run::failure::Failure;
use wideleaf_run::interrupts::Interrupts;
use wideleaf_run::migration::{Address, check_rate};

use crate::options::{FormatArg, parse_duration, parse_some_bytes};
use crate::report::moved::migrated;
use crate::vm::progress::{ResultOutput, ask_for_long, other_answer};

/// Arguments of `wideleaf vm SOCKET migrate`.
#[derive(Args, Debug)]
pub struct MigrateArgs {
    /// Address of a `wideleaf run --incoming`, which waits there: unix:PATH, tcp:HOST:PORT, or stdio for standard input
    /// and output, with the result on standard error
    #[arg(value_name = "ADDRESS")]
    to: Address,

    /// Longest time without a running guest: the migration is refused if the guest writes too fast for it, or the
    /// target needs longer
    #[arg(long, value_name = "TIME", default_value = "50ms", value_parser = parse_duration)]
    pause: Duration,

    /// Most bytes of RAM per second that are sent while the guest runs [default: as fast as the connection]
    #[arg(long, value_name = "SIZE", value_parser = parse_some_bytes)]
    bytes_per_second: Option<Bytes>,

    /// Let the guest move before all of its RAM has, if what is left does not fit into the pause: `when-needed`, once
    /// more rounds do not help, or after a number of rounds (libvirt's --postcopy-after-precopy is 1). Where the
    /// connection is lost before all has come, the guest waits at the target for `recover` if that run has a
    /// --control-socket, and ends otherwise
    #[arg(long, value_name = "WHEN", num_args = 0..=1, default_missing_value = WHEN_NEEDED, value_parser = parse_when)]
    postcopy: Option<PostCopyFrom>,
}

/// Value of `--postcopy` without a number.
const WHEN_NEEDED: &str = "when-needed";

/// Reads `when-needed`, or a number of rounds.
fn parse_when(text: &str) -> Result<PostCopyFrom, String> {
    match text {
        WHEN_NEEDED => Ok(PostCopyFrom::WhenNeeded),
        number => number
            .parse()
            .map(PostCopyFrom::AfterRounds)
            .map_err(|_| "write when-needed, or a number of rounds from 1 on".to_owned()),
    }
}

/// Moves the VM at this socket.
///
/// # Errors
/// [`Failure`] in one line; the VM then goes on here, or says that it waits for the operator.
pub fn main(socket: &Path, args: &MigrateArgs, format: FormatArg) -> Result<(), Failure> {
    let interrupts = Interrupts::install_with(crate::stderr::interrupted)?.also_at_hangup()?;
    let bytes_per_second_max = args.bytes_per_second.and_then(|bytes| NonZeroU64::new(bytes.get()));
    check_rate(bytes_per_second_max).map_err(Failure::Usage)?;
    let output = ResultOutput::open(&args.to, format)?;
    let ends = args.to.connect(&format!("start `wideleaf run --incoming {}` there first", args.to))?;
    let request = VmRequest::Migrate {
        to: args.to.to_string(),
        pause_ms_max: args.pause.as_millis() as u64,
        bytes_per_second_max,
        post_copy: args.postcopy,
    };
    let passed = [ends.reader.as_fd(), ends.writer.as_fd()];
    match ask_for_long(socket, request, [&passed, &[]], "migrating", &interrupts)?.0 {
        VmAnswer::Migrated(moved) => output.show(&moved, migrated(&moved)),
        _ => Err(other_answer(socket)),
    }
}
