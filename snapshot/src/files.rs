//! The open files of a snapshot and of all its bases: what a process gets that has no paths.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;

use crate::error::{OpenError, Problem};
use crate::index::{self, BaseLink, DEPTH_MAX, Header, Source};
use crate::{MACHINE_FILE, MEMORY_FILE, WINDOWS_FILE};

/// Way of reading the file `memory`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Caching {
    /// Through the page cache: VMs that are restored from one snapshot share it.
    #[default]
    PageCache,
    /// Past the page cache (`O_DIRECT`, open(2)): buffers must begin at a multiple of 4 KiB.
    Direct,
}

/// The files of one folder that its pages are read from.
#[derive(Debug)]
pub struct Layer {
    /// Name of the folder in messages: one line.
    pub name: String,
    /// Index of the windows.
    pub windows: File,
    /// Bytes of the pages.
    pub memory: File,
}

/// The open files of a snapshot and its bases. They can be passed to another process one by one.
#[derive(Debug)]
pub struct Files {
    /// State of the machine.
    pub machine: File,
    /// The snapshot, then its base, then the base of that: 1 to 16 folders.
    pub layers: Vec<Layer>,
}

impl Files {
    /// Opens the snapshot in a folder, and the bases that it names.
    ///
    /// # Errors
    /// [`OpenError`] if a file is missing, is no regular file, or an index does not begin as it must. All other checks
    /// are those of [`crate::Opened::from_files`].
    pub fn open(folder: &Path, caching: Caching) -> Result<Files, OpenError> {
        let snapshot = shown(folder);
        Files::open_chain(folder, caching).map_err(|problem| OpenError { snapshot, problem })
    }

    fn open_chain(folder: &Path, caching: Caching) -> Result<Files, Problem> {
        let opened = open_folder(folder, MACHINE_FILE)?;
        let machine = open_file(&opened, MACHINE_FILE, OFlag::empty())?;
        let (first, mut link) = open_layer(&opened, shown(folder), caching)?;
        let (mut layers, mut folder) = (vec![first], folder.to_owned());
        while let Some(below) = link {
            if layers.len() > DEPTH_MAX as usize {
                return Err(Problem::BaseCount { needed: layers.len() + below.depth as usize, found: layers.len() });
            }
            folder = index::base_folder(&folder, &below);
            let in_base = |problem| Problem::Base { base: shown(&folder), problem: Box::new(problem) };
            let opened = open_folder(&folder, WINDOWS_FILE).map_err(in_base)?;
            let (layer, next) = open_layer(&opened, shown(&folder), caching).map_err(in_base)?;
            layers.push(layer);
            link = next;
        }
        Ok(Files { machine, layers })
    }
}

fn open_layer(folder: &File, name: String, caching: Caching) -> Result<(Layer, Option<BaseLink>), Problem> {
    let flags = match caching {
        Caching::PageCache => OFlag::empty(),
        Caching::Direct => OFlag::O_DIRECT,
    };
    let windows = open_file(folder, WINDOWS_FILE, OFlag::empty())?;
    let header = Header::read(&mut Source::new(io::BufReader::new(At::start(&windows))))?;
    let memory = open_file(folder, MEMORY_FILE, flags)?;
    Ok((Layer { name, windows, memory }, header.base))
}

/// Opens a folder: the files in it are of one snapshot, whatever a save puts in its place meanwhile. An error names
/// `file`, the first one that is needed from it.
pub(crate) fn open_folder(folder: &Path, file: &'static str) -> Result<File, Problem> {
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY;
    let opened = OpenOptions::new().read(true).custom_flags(flags.bits()).open(folder);
    opened.map_err(|source| Problem::Io { file, source })
}

/// Opens a regular file without waiting, and not through a symbolic link.
pub(crate) fn open_file(folder: &File, file: &'static str, flags: OFlag) -> Result<File, Problem> {
    let flags = flags | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK | OFlag::O_NOFOLLOW | OFlag::O_NOCTTY;
    let opened = openat(folder, file, flags, Mode::empty());
    let opened = File::from(opened.map_err(|errno| Problem::Io { file, source: errno.into() })?);
    check_regular(&opened, file)?;
    Ok(opened)
}

/// # Errors
/// [`Problem::NotAFile`].
pub(crate) fn check_regular(opened: &File, file: &'static str) -> Result<u64, Problem> {
    let metadata = opened.metadata().map_err(|source| Problem::Io { file, source })?;
    if metadata.is_file() { Ok(metadata.len()) } else { Err(Problem::NotAFile { file }) }
}

/// A folder's name for a message of one line.
pub(crate) fn shown(folder: &Path) -> String {
    let is_plain = |c: char| !c.is_control();
    let folder = folder.display().to_string();
    if folder.chars().all(is_plain) { folder } else { folder.escape_debug().to_string() }
}

/// Path from one folder to another; both exist.
///
/// # Errors
/// Error of the kernel if one of them cannot be found.
pub(crate) fn relative(from: &Path, to: &Path) -> io::Result<PathBuf> {
    let (from, to) = (from.canonicalize()?, to.canonicalize()?);
    let common = from.components().zip(to.components()).take_while(|(one, other)| one == other).count();
    let up = from.components().skip(common).map(|_| std::path::Component::ParentDir);
    Ok(up.chain(to.components().skip(common)).collect())
}

/// Reads a file from a place of its own: the file's position, which processes may share, stays.
pub(crate) struct At<'a> {
    file: &'a File,
    offset: u64,
}

impl At<'_> {
    pub fn start(file: &File) -> At<'_> {
        At { file, offset: 0 }
    }
}

impl Read for At<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let read = std::os::unix::fs::FileExt::read_at(self.file, bytes, self.offset)?;
        self.offset += read as u64;
        Ok(read)
    }
}
