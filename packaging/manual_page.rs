//! A manual page of a command: clap_mangen's sections, except two in which lines and values matter.
//!
//! | section | here | clap_mangen's |
//! |---|---|---|
//! | SYNOPSIS | the usage line of `--help` | lists each option, without its value |
//! | NOTES | the end of `--help`, line by line | fills its lines into one paragraph, examples and signals with them |

use std::io::{self, Write};

use clap::Command;
use clap_mangen::Man;

/// Writes the page of a command that is built ([`Command::build`]), for that section of the manual.
///
/// # Errors
/// Those of `out`.
pub fn write(command: &Command, section: &str, out: &mut dyn Write) -> io::Result<()> {
    let man = Man::new(command.clone()).section(section);
    man.render_title(out)?;
    man.render_name_section(out)?;
    let usage = command.clone().render_usage().to_string();
    write_lines("SYNOPSIS", usage.strip_prefix("Usage: ").unwrap_or(&usage), out)?;
    man.render_description_section(out)?;
    if command.get_arguments().any(|argument| !argument.is_hide_set()) {
        man.render_options_section(out)?;
    }
    if command.get_subcommands().any(|command| !command.is_hide_set()) {
        man.render_subcommands_section(out)?;
    }
    if let Some(notes) = command.get_after_long_help().or_else(|| command.get_after_help()) {
        write_lines("NOTES", &notes.to_string(), out)?;
    }
    match command.get_version() {
        Some(_) => man.render_version_section(out),
        None => Ok(()),
    }
}

/// Writes a section with its lines as they are (`.nf` in groff_man(7)). A line that begins like a request is
/// escaped (`\&`).
fn write_lines(section: &str, text: &str, out: &mut dyn Write) -> io::Result<()> {
    write!(out, ".SH {section}\n.nf\n")?;
    for line in text.lines() {
        let guard = if line.starts_with(['.', '\'']) { r"\&" } else { "" };
        writeln!(out, "{guard}{}", line.replace('\\', r"\e").replace('-', r"\-"))?;
    }
    writeln!(out, ".fi")
}
