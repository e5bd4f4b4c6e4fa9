//! Parses the command line, runs, prints one line after a failure and sets the exit code. Everything else is
//! in the library.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::{CommandFactory, Parser};
use tracing_appender::non_blocking::{ErrorCounter, NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use wideleaf_daemon::config::{CONFIG_PATH, ConfigFile};
use wideleaf_daemon::{daemon, host};
use wideleaf_memory::allocator::use_one_arena;

// Also a file of the command line; that crate embeds the guest image and is therefore not a dependency.
#[path = "../../../packaging/manual_page.rs"]
mod manual_page;

/// Section of the manual: system administration commands (man(1)).
const MANUAL_SECTION: &str = "8";

/// Manages the guests of this host: its own and those of other VMMs.
///
/// It finds KVM guests (QEMU's, libvirt's) and backs their memory with large pages where that pays, within one
/// budget for the whole host. It reports on a Unix socket (`wideleaf list`) and to Prometheus. When it ends, the
/// guests stay as they are.
#[derive(Debug, Parser)]
#[command(
    name = "wideleafd",
    version,
    after_help = "Examples:
  wideleafd                                  with /etc/wideleaf/wideleafd.toml, or the defaults without that file
  wideleafd --config test.toml --check       prints the configuration, or the first mistake in it
  WIDELEAF_LOG=debug wideleafd               logs more to standard error
Signals: SIGHUP reads the configuration again, SIGTERM and SIGINT end it."
)]
struct Cli {
    /// The configuration file
    #[arg(long, value_name = "FILE", default_value = CONFIG_PATH)]
    config: PathBuf,
    /// Print the configuration in the file's own words, or the first mistake in it, and end
    #[arg(long)]
    check: bool,
    /// Print the manual page, for packages, and end
    #[arg(long, hide = true)]
    man: bool,
}

/// Upper bound on lines that wait for a journal that hangs; later ones are lost and counted. An hour of a busy
/// host, and a few MiB.
const LINES_WAITING_MAX: usize = 16 << 10;

/// Exit codes as of `wideleaf`: an invalid configuration, a host that lacks something, output that cannot be written.
const EXIT_INPUT: u8 = 3;
const EXIT_HOST: u8 = 4;
const EXIT_OUTPUT: u8 = 7;

fn main() -> ExitCode {
    // Without this, 114 threads for 50 guests allocate from 16 arenas, each with free pieces that no other one uses: 31
    // MiB, and 18 in one arena. They allocate too seldom to wait for one another.
    use_one_arena();
    // A limit on the size of files becomes an error of the write instead of the end: this handler does nothing.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default());
    let cli = Cli::parse();
    if cli.man {
        return print_manual();
    }
    let file = ConfigFile::at(cli.config);
    let config = match file.read() {
        Ok(config) => config,
        Err(error) => return failed(EXIT_INPUT, &error),
    };
    if cli.check {
        // The reader may have closed the pipe early.
        let _ = write!(std::io::stdout(), "{}", config.to_toml());
        return ExitCode::SUCCESS;
    }
    let log = match log_to_standard_error() {
        Ok(log) => log,
        Err(error) => return failed(EXIT_INPUT, &error),
    };
    let ended = daemon::run(config, file, host::doors());
    log.end();
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failed(EXIT_HOST, &error),
    }
}

fn print_manual() -> ExitCode {
    let mut command = Cli::command();
    command.build();
    match manual_page::write(&command, MANUAL_SECTION, &mut std::io::stdout()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failed(EXIT_OUTPUT, &error),
    }
}

fn failed(code: u8, error: &dyn std::error::Error) -> ExitCode {
    eprintln!("wideleafd: {error}");
    ExitCode::from(code)
}

/// The log's thread. A journal that hangs delays only this thread, and none that answers or manages.
struct Log {
    lost: ErrorCounter,
    /// On a drop it waits for unwritten lines, about a second at most.
    writer: WorkerGuard,
}

impl Log {
    fn end(self) {
        match self.lost.dropped_lines() {
            0 => {}
            lost => tracing::warn!("{lost} lines of this log were lost: standard error was not read"),
        }
        drop(self.writer);
    }
}

/// The log's levels cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot use WIDELEAF_LOG={text}: {error}; write a level such as debug, or wideleaf_attach=trace")]
struct LogLevelsError {
    text: String,
    error: tracing_subscriber::filter::ParseError,
}

fn log_to_standard_error() -> Result<Log, LogLevelsError> {
    let filter = match std::env::var("WIDELEAF_LOG") {
        Ok(text) => text.parse::<Targets>().map_err(|error| LogLevelsError { text, error })?,
        Err(_) => Targets::new().with_default(LevelFilter::INFO),
    };
    let (to, writer) =
        NonBlockingBuilder::default().buffered_lines_limit(LINES_WAITING_MAX).lossy(true).finish(std::io::stderr());
    let lost = to.error_counter();
    // The journal has its own clock. If standard error is closed, the subscriber would report that on standard
    // error, and panic.
    let lines = tracing_subscriber::fmt::layer().with_writer(to).without_time();
    let lines = lines.with_target(false).with_ansi(false).log_internal_errors(false);
    tracing_subscriber::registry().with(filter).with(lines).init();
    Ok(Log { lost, writer })
}
