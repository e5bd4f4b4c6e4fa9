//! The workload of a Linux guest, from the command line. All of it is checked here, because an error after the
//! guest's boot comes late.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use wideleaf_kernels::registry::{by_name, find};
use wideleaf_memory::input_file::InputFile;
use wideleaf_policies::Bytes;
use wideleaf_policies::units::gib;
use wideleaf_protocol::CommandLine;
use wideleaf_run::failure::Failure;

/// Longest program that is put into an initramfs, which a guest unpacks into its memory.
const PROGRAM_MAX: Bytes = gib(1);

/// The only job of a guest.
#[derive(Debug, PartialEq, Eq)]
pub enum Workload {
    /// A built-in kernel with its parameters.
    Kernel(String),
    /// A static program with its arguments.
    Program {
        /// Contents of the ELF file.
        file: Vec<u8>,
        /// Arguments, each ended by a zero byte.
        arguments: Vec<u8>,
    },
}

impl Workload {
    /// The kernel `bench`, or the program that is the first word of `exec`.
    ///
    /// # Errors
    /// [`Failure::Usage`] for an unknown kernel, [`Failure::Input`] for a program that could not run.
    pub fn new(bench: Option<&str>, exec: &[OsString]) -> Result<Workload, Failure> {
        match (bench, exec.split_first()) {
            (Some(bench), _) => Ok(Workload::Kernel(kernel_line(bench)?)),
            (None, Some((program, arguments))) => program_of(Path::new(program), arguments),
            (None, None) => {
                Err(Failure::Usage("cannot make an image: its guest has nothing to run; use --bench or --exec".into()))
            }
        }
    }
}

/// `cg.A` as `npb.cg class=A`; a kernel's own name and parameters unchanged.
fn kernel_line(bench: &str) -> Result<String, Failure> {
    let line = with_class(bench).unwrap_or_else(|| bench.to_owned());
    let refuse = |error: &dyn std::fmt::Display| Failure::Usage(format!("cannot use --bench {bench:?}: {error}"));
    let command_line = CommandLine::new(&line).map_err(|error| refuse(&error))?;
    let kernel = find(command_line).map_err(|error| refuse(&error))?;
    // Parsed fully, so that values are checked as well as names.
    kernel.memory_for(&line, 1).map_err(|error| refuse(&error))?;
    Ok(line)
}

/// Parses `NAME.CLASS` and further text, with NAME a kernel that has classes; `npb.` may be omitted.
fn with_class(bench: &str) -> Option<String> {
    let (word, rest) = bench.split_once(char::is_whitespace).unwrap_or((bench, ""));
    let (name, class) = word.rsplit_once('.')?;
    let kernel = by_name(name).or_else(|| by_name(&format!("npb.{name}")))?;
    if kernel.classes.is_empty() {
        return None;
    }
    Some(format!("{} class={class} {rest}", kernel.name).trim_end().to_owned())
}

fn program_of(path: &Path, arguments: &[OsString]) -> Result<Workload, Failure> {
    let refuse = |why: &dyn std::fmt::Display| Failure::Input(format!("cannot use --exec {}: {why}", path.display()));
    let read = InputFile::open(path).and_then(|file| file.read(PROGRAM_MAX));
    let file = read.map_err(|error| refuse(&error))?;
    check_program(&file).map_err(|why| refuse(&why))?;
    let arguments = arguments.iter().flat_map(|argument| [argument.as_bytes(), b"\0"].concat()).collect();
    Ok(Workload::Program { file, arguments })
}

/// Checks that Linux on x86-64 can run this file alone, without a dynamic linker or an interpreter. The offsets are
/// those of the System V ABI, "ELF Header" and "Program Header".
pub(super) fn check_program(file: &[u8]) -> Result<(), &'static str> {
    const MACHINE_X86_64: u64 = 62;
    const TYPE_EXECUTABLE: u64 = 2;
    const TYPE_SHARED: u64 = 3;
    const PT_INTERP: u64 = 3;
    const CUT_OFF: &str = "its ELF header is cut off";
    if !file.starts_with(b"\x7fELF") {
        return Err("it is not an ELF file (a script needs an interpreter, and the guest has none)");
    }
    let number = |at: u64, bytes: usize| number_at(file, at, bytes).ok_or(CUT_OFF);
    if (number(4, 1)?, number(5, 1)?, number(18, 2)?) != (2, 1, MACHINE_X86_64) {
        return Err("it is not for x86-64");
    }
    // A static program that may be loaded anywhere is a shared object without an interpreter.
    if ![TYPE_EXECUTABLE, TYPE_SHARED].contains(&number(16, 2)?) {
        return Err("it is not an executable file");
    }
    let (headers, header_bytes, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
    for index in 0..count {
        let header = headers.checked_add(index * header_bytes).ok_or(CUT_OFF)?;
        if number(header, 4)? == PT_INTERP {
            return Err("it is linked dynamically, and the guest has no dynamic linker; link it with -static");
        }
    }
    Ok(())
}

/// A little-endian number of the file; `None` beyond its end.
fn number_at(file: &[u8], at: u64, bytes: usize) -> Option<u64> {
    let at = usize::try_from(at).ok()?;
    let field = file.get(at..at.checked_add(bytes)?)?;
    Some(field.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_is_named_with_its_class_or_with_its_parameters() {
        let line = |bench| kernel_line(bench).map_err(|failure| failure.to_string());
        assert_eq!(line("cg.A"), Ok("npb.cg class=A".to_owned()));
        assert_eq!(line("cg.a"), Ok("npb.cg class=a".to_owned()));
        assert_eq!(line("npb.is.S buckets=1"), Ok("npb.is class=S buckets=1".to_owned()));
        assert_eq!(line("gups log2_words=22"), Ok("gups log2_words=22".to_owned()));
        assert_eq!(line("npb.cg class=W"), Ok("npb.cg class=W".to_owned()));
    }

    #[test]
    fn an_unknown_kernel_is_refused_with_the_known_ones() {
        let refused = |bench| kernel_line(bench).expect_err("refused").to_string();
        assert!(
            refused("linpack")
                .starts_with("cannot use --bench \"linpack\": unknown kernel \"linpack\"; choose one of gups")
        );
        assert!(refused("gups.A").contains("unknown kernel \"gups.A\""));
        assert!(refused("cg.Q").contains("class=Q: expected one of S, W"));
        assert!(refused("gups words=7").contains("unknown parameter words="));
        assert!(refused("").contains("no kernel named"));
    }

    /// An ELF header of 64 bytes and one program header of this type.
    fn elf(machine: u8, kind: u8, segment: u8) -> Vec<u8> {
        let mut file = vec![0; 120];
        file[..6].copy_from_slice(b"\x7fELF\x02\x01");
        (file[16], file[18], file[32], file[54], file[56], file[64]) = (kind, machine, 64, 56, 1, segment);
        file
    }

    #[test]
    fn only_static_programs_for_x86_64_are_taken() {
        assert_eq!(check_program(&elf(62, 2, 1)), Ok(()));
        assert_eq!(check_program(&elf(62, 3, 1)), Ok(()));
        assert_eq!(check_program(&elf(183, 2, 1)), Err("it is not for x86-64"));
        assert_eq!(check_program(&elf(62, 1, 1)), Err("it is not an executable file"));
        assert!(check_program(&elf(62, 3, 3)).expect_err("refused").starts_with("it is linked dynamically"));
        assert!(check_program(b"#!/bin/sh\n").expect_err("refused").starts_with("it is not an ELF file"));
    }

    #[test]
    fn the_check_survives_a_program_cut_at_any_byte() {
        let file = elf(62, 2, 1);
        // From here on the only field that is read of the program header is complete.
        let whole = 68;
        assert!((0..whole).all(|length| check_program(&file[..length]).is_err()));
        assert!((whole..=file.len()).all(|length| check_program(&file[..length]).is_ok()));
        let mut far = file;
        far[32..40].fill(0xff);
        assert_eq!(check_program(&far), Err("its ELF header is cut off"));
    }
}
