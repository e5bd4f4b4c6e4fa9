//! Commands of `wideleaf` that have moved to the program `wideleaf-lab`. A command line that names one is refused with
//! the present command. Nothing here starts a program.

use std::ffi::OsString;

use wideleaf_run::failure::Failure;

/// Commands that `wideleaf-lab` has under the same names.
pub const IN_LAB: [&str; 4] = ["experiment", "simulate", "trace", "image"];

/// Command of `wideleaf-lab` that does what `wideleaf tlbcost --predict` did.
pub const PREDICT: &str = "predict";

/// Refusal of a command line that clap does not accept and that names such a command; `None` for any other.
pub fn refusal(command_line: &[OsString]) -> Option<Failure> {
    let words = command_line.iter().skip(1).map(|word| word.to_str().unwrap_or_default());
    let mut words = words.skip_while(|word| *word == "help");
    let (was, now) = match words.next()? {
        "tlbcost" if words.any(|word| word.split('=').next() == Some("--predict")) => ("tlbcost --predict", PREDICT),
        name if IN_LAB.contains(&name) => (name, name),
        _ => return None,
    };
    Some(Failure::Usage(format!(
        "cannot run `wideleaf {was}`: the program wideleaf-lab has this command now; run `wideleaf-lab {now}` (package \
         wideleaf-lab)"
    )))
}
