//! The kubectl plugin. Everything else is in the library.

use std::process::ExitCode;

use clap::Parser as _;
use wideleaf_node::kubectl::{Arguments, run};

/// Exit code for a cluster that does not answer, as of `wideleaf`.
const EXIT_HOST: u8 = 4;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let done = runtime.map_err(|error| error.to_string()).and_then(|runtime| runtime.block_on(run(&arguments)));
    // The reader may have closed the pipe early.
    let print = |text: String| drop(std::io::Write::write_all(&mut std::io::stdout(), text.as_bytes()));
    match done {
        Ok(text) => {
            print(text);
            ExitCode::SUCCESS
        }
        Err(line) => {
            eprintln!("kubectl-wideleaf: {line}");
            ExitCode::from(EXIT_HOST)
        }
    }
}
