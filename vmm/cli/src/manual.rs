//! `wideleaf completions` and `wideleaf man`: what a shell and man(1) know of this program, from the same description that
//! parses the command line.

use std::fs;
use std::io;

use clap::CommandFactory;

use crate::args::{Cli, CompletionsArgs, ManArgs};
use crate::failure::Failure;

/// Prints what a shell completes.
///
/// # Errors
/// [`Failure::Output`] where standard output is closed.
pub fn completions(args: &CompletionsArgs) -> Result<(), Failure> {
    // Into memory first: what generates it panics where a write fails.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "wideleaf", &mut script);
    io::Write::write_all(&mut io::stdout(), &script)
        .map_err(|error| Failure::Output(format!("cannot write to standard output: {error}")))
}

/// Writes a manual page for the program and one for each command that it shows.
///
/// # Errors
/// [`Failure::Output`] where the folder can not be made or written to.
pub fn pages(args: &ManArgs) -> Result<(), Failure> {
    let cannot =
        |error: io::Error| Failure::Output(format!("cannot write manual pages to {}: {error}", args.folder.display()));
    fs::create_dir_all(&args.folder).map_err(cannot)?;
    clap_mangen::generate_to(Cli::command(), &args.folder).map_err(cannot)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_command_that_is_shown_has_its_page() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        pages(&ManArgs { folder: folder.path().join("man1") }).expect("the pages are written");
        let shown = Cli::command()
            .get_subcommands()
            .filter(|command| !command.is_hide_set())
            .map(|c| c.get_name().to_owned())
            .collect::<Vec<_>>();
        for command in &shown {
            let page = fs::read_to_string(folder.path().join(format!("man1/wideleaf-{command}.1"))).expect("its page");
            assert!(page.contains(".SH SYNOPSIS") && page.contains(command), "{page}");
        }
        let pages = fs::read_dir(folder.path().join("man1")).expect("the folder").count();
        assert!(pages > shown.len(), "{pages} pages for {shown:?} and the program");
    }
}
