//! `wideleaf completions` and `wideleaf man`: shell completions and manual pages, generated from the description
//! that parses the command line.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use clap::{Args, Command};
use clap_mangen::Man;
use wideleaf_run::failure::Failure;

use crate::manual_page;
use crate::output::print;

/// Arguments of `wideleaf completions`.
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// Shell to complete for
    pub shell: clap_complete::Shell,
}

/// Arguments of `wideleaf man`.
#[derive(Debug, Args)]
pub struct ManArgs {
    /// Folder to write to
    #[arg(value_name = "FOLDER")]
    pub folder: PathBuf,
}

/// Prints the completion script of a shell.
///
/// # Errors
/// [`Failure::Output`] if it could not be written.
pub fn completions(program: &mut Command, args: &CompletionsArgs) -> Result<(), Failure> {
    // Into memory first: the generator panics if a write fails.
    let mut script = Vec::new();
    let name = program.get_name().to_owned();
    clap_complete::generate(args.shell, program, name, &mut script);
    print(&String::from_utf8_lossy(&script))
}

/// Writes a manual page for the program and one for each visible command.
///
/// # Errors
/// [`Failure::Output`] if the folder cannot be made or written to.
pub fn pages(program: Command, args: &ManArgs) -> Result<(), Failure> {
    let cannot =
        |error: io::Error| Failure::Output(format!("cannot write manual pages to {}: {error}", args.folder.display()));
    fs::create_dir_all(&args.folder).map_err(cannot)?;
    let mut program = program.disable_help_subcommand(true);
    program.build();
    write_pages(&program, &args.folder).map_err(cannot)
}

fn write_pages(command: &Command, folder: &Path) -> io::Result<()> {
    command
        .get_subcommands()
        .filter(|command| !command.is_hide_set())
        .try_for_each(|command| write_pages(command, folder))?;
    let mut page = Vec::new();
    manual_page::write(command, "1", &mut page)?;
    fs::write(folder.join(Man::new(command.clone()).get_filename()), page)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Cli;
    use clap::CommandFactory as _;

    #[test]
    fn a_page_keeps_the_lines_of_its_examples_and_the_values_of_its_usage() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        pages(Cli::command(), &ManArgs { folder: folder.path().to_owned() }).expect("the pages are written");
        let page = fs::read_to_string(folder.path().join("wideleaf-attach.1")).expect("its page");
        assert!(page.contains(".SH SYNOPSIS\n.nf\nwideleaf attach [OPTIONS] "), "{page}");
        assert!(page.contains("\nExamples:\n  Show what would be done:\n    wideleaf attach web \\-\\-dry\\-run\n"));
        assert!(!page.contains(".SH EXTRA"), "{page}");
    }

    #[test]
    fn each_visible_command_has_its_page() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        pages(Cli::command(), &ManArgs { folder: folder.path().join("man1") }).expect("the pages are written");
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
