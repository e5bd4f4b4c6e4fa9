//! The initramfs: a newc archive, packed with gzip (Documentation/driver-api/early-userspace/buffer-format.rst).
//!
//! ```text
//!   dev/ dev/console proc/ sys/ tmp/ init
//!   wideleaf/ wideleaf/kernel | wideleaf/program wideleaf/arguments
//! ```
//!
//! It does not depend on the time and place of its making: it has no times, only root as owner, and numbers in list
//! order.

use std::io::{self, Write};

use crate::image::workload::Workload;
use cpio::newc::{self, Builder, ModeFileType};
use flate2::{Compression, GzBuilder};
use wideleaf_linux_guest::INIT;
use wideleaf_protocol::linux::{ARGUMENTS_FILE, KERNEL_FILE, PROGRAM_FILE};
use wideleaf_run::failure::Failure;

/// Folders, parents first.
const FOLDERS: [&str; 5] = ["dev", "proc", "sys", "tmp", "wideleaf"];
/// The console before `/dev` is mounted: Linux opens it for its first process (Documentation/admin-guide/devices.txt).
const CONSOLE: (u32, u32) = (5, 1);

/// Content of one entry in the archive.
enum Content<'a> {
    Folder,
    CharacterDevice(u32, u32),
    Program(&'a [u8]),
    File(&'a [u8]),
}

/// The initramfs that runs this workload.
///
/// # Errors
/// [`Failure::Input`] if a file is too large for the format.
pub fn initramfs(workload: &Workload) -> Result<Vec<u8>, Failure> {
    let cannot = |error: io::Error| Failure::Input(format!("cannot make an initramfs: {error}"));
    let mut packed = GzBuilder::new().write(Vec::new(), Compression::default());
    write_archive(&mut packed, workload).map_err(cannot)?;
    packed.finish().map_err(cannot)
}

fn write_archive(mut to: impl Write, workload: &Workload) -> io::Result<()> {
    let folders = FOLDERS.iter().map(|name| (*name, Content::Folder));
    let console = ("dev/console", Content::CharacterDevice(CONSOLE.0, CONSOLE.1));
    let files = [console, ("init", Content::Program(INIT))].into_iter().chain(files_of(workload));
    for (index, (name, content)) in (1..).zip(folders.chain(files)) {
        write_entry(&mut to, index, name, &content)?;
    }
    newc::trailer(to)?;
    Ok(())
}

fn files_of(workload: &Workload) -> Vec<(&'static str, Content<'_>)> {
    match workload {
        Workload::Kernel(line) => vec![(KERNEL_FILE, Content::File(line.as_bytes()))],
        Workload::Program { file, arguments } => {
            vec![(PROGRAM_FILE, Content::Program(file)), (ARGUMENTS_FILE, Content::File(arguments))]
        }
    }
}

fn write_entry(to: &mut impl Write, index: u32, name: &str, content: &Content<'_>) -> io::Result<()> {
    let (kind, mode, bytes) = match content {
        Content::Folder => (ModeFileType::Directory, 0o755, &[][..]),
        Content::CharacterDevice(..) => (ModeFileType::Char, 0o600, &[][..]),
        Content::Program(bytes) => (ModeFileType::Regular, 0o755, *bytes),
        Content::File(bytes) => (ModeFileType::Regular, 0o644, *bytes),
    };
    let mut entry = Builder::new(name.trim_start_matches('/')).ino(index).mode(mode).set_mode_file_type(kind);
    if let Content::CharacterDevice(major, minor) = content {
        entry = entry.rdev_major(*major).rdev_minor(*minor);
    }
    let length = u32::try_from(bytes.len()).map_err(|_| io::Error::other(format!("{name} is longer than 4 GiB")))?;
    let mut writer = entry.write(to, length);
    writer.write_all(bytes)?;
    writer.finish()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use flate2::read::GzDecoder;

    use super::*;

    struct Unpacked {
        name: String,
        mode: u32,
        device: (u32, u32),
        bytes: Vec<u8>,
    }

    fn unpacked(packed: &[u8]) -> Vec<Unpacked> {
        let mut archive = Vec::new();
        GzDecoder::new(packed).read_to_end(&mut archive).expect("gzip");
        let (mut rest, mut entries) = (&archive[..], Vec::new());
        loop {
            let mut reader = newc::Reader::new(rest).expect("newc");
            let entry = reader.entry().clone();
            if entry.is_trailer() {
                return entries;
            }
            let mut bytes = Vec::new();
            reader.read_to_end(&mut bytes).expect("the entry is whole");
            let device = (entry.rdev_major(), entry.rdev_minor());
            assert_eq!((entry.mtime(), entry.uid(), entry.gid()), (0, 0, 0));
            entries.push(Unpacked { name: entry.name().to_owned(), mode: entry.mode(), device, bytes });
            rest = reader.finish().expect("the next entry");
        }
    }

    #[test]
    fn an_initramfs_has_init_a_console_and_the_workload() {
        let packed = initramfs(&Workload::Kernel("npb.cg class=S".to_owned())).expect("an archive");
        let entries = unpacked(&packed);
        let names: Vec<_> = entries.iter().map(|entry| format!("{} {:o}", entry.name, entry.mode)).collect();
        let folders = FOLDERS.map(|name| format!("{name} 40755"));
        let files = ["dev/console 20600", "init 100755", "wideleaf/kernel 100644"].map(str::to_owned);
        assert_eq!(names, [&folders[..], &files[..]].concat());
        assert_eq!(entries[5].device, CONSOLE);
        assert!(entries[6].bytes == INIT);
        assert_eq!(entries[7].bytes, b"npb.cg class=S");
    }

    #[test]
    fn equal_arguments_give_equal_files() {
        let workload = || Workload::Program { file: b"\x7fELF".to_vec(), arguments: b"-v\0".to_vec() };
        let (one, other) = (initramfs(&workload()).expect("one"), initramfs(&workload()).expect("another"));
        assert!(one == other);
        let files: Vec<_> = unpacked(&one).into_iter().skip(7).map(|entry| (entry.name, entry.bytes)).collect();
        let expected = [("wideleaf/program", &b"\x7fELF"[..]), ("wideleaf/arguments", b"-v\0")];
        assert_eq!(files, expected.map(|(name, bytes)| (name.to_owned(), bytes.to_vec())));
    }

    #[test]
    fn init_is_a_program_that_the_check_accepts() {
        assert_eq!(crate::image::workload::check_program(INIT), Ok(()));
    }
}
