//! Input files that a user named: opened without waiting, and read up to a bound.
//!
//! ```text
//!   a regular file                        opened
//!   a pipe that this process already has  opened by `open_stream`: /dev/stdin, <(command) in a shell
//!   a folder, a FIFO, a device, a socket  refused, and named: a FIFO may never begin, a device may never end
//! ```
//!
//! The kind of file is checked before opening it, since opening a device may have an effect (a watchdog starts, a
//! tape rewinds). The opened file is checked again (`fstat(2)`), since the path may lead elsewhere by then. Nothing
//! is opened in a way that waits (`O_NONBLOCK`).

use std::fs::{self, File, FileType, Metadata};
use std::io::{self, Read as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use wideleaf_policies::Bytes;

/// Start of the link in `/proc/self/fd` to a pipe without a name (proc(5)).
const NAMELESS_PIPE: &str = "pipe:[";

/// A file that is open for reading.
#[derive(Debug)]
pub struct InputFile {
    file: File,
    metadata: Metadata,
}

/// Why a file cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum InputError {
    /// The path does not name a regular file.
    #[error("it is {kind}: name a file")]
    NotAFile {
        /// Kind of the file, with its article.
        kind: &'static str,
    },
    /// The file is longer than its reader allows.
    #[error("it is longer than the limit of {most}")]
    TooLong {
        /// Limit of the reader.
        most: Bytes,
    },
    /// The file is not text.
    #[error("it is not text: byte {at} is not UTF-8")]
    NoText {
        /// Offset of the first byte that is not UTF-8.
        at: usize,
    },
    /// Error of the kernel.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<InputError> for io::Error {
    fn from(error: InputError) -> io::Error {
        match error {
            InputError::Io(error) => error,
            other => io::Error::new(io::ErrorKind::InvalidInput, other.to_string()),
        }
    }
}

impl InputFile {
    /// Opens a regular file.
    ///
    /// # Errors
    /// [`InputError::NotAFile`], [`InputError::Io`].
    pub fn open(path: &Path) -> Result<InputFile, InputError> {
        open(path, &|_| false)
    }

    /// Opens a regular file, or a pipe that this process already has under another number. Reading a pipe waits
    /// for its writer.
    ///
    /// # Errors
    /// [`InputError::NotAFile`], [`InputError::Io`].
    pub fn open_stream(path: &Path) -> Result<InputFile, InputError> {
        open(path, &|file| is_nameless_pipe(file))
    }

    /// Size when it was opened; 0 for a pipe, and for a kernel file that is made while it is read.
    pub fn bytes(&self) -> Bytes {
        Bytes::new(self.metadata.len())
    }

    /// The file itself, for reading it piece by piece.
    pub fn into_file(self) -> File {
        self.file
    }

    /// Reads the whole file.
    ///
    /// # Errors
    /// [`InputError::TooLong`] beyond `most`, without reading if the size says so; [`InputError::Io`].
    pub fn read(mut self, most: Bytes) -> Result<Vec<u8>, InputError> {
        if self.bytes() > most {
            return Err(InputError::TooLong { most });
        }
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(self.bytes().as_usize()).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        // One byte more shows that the file is longer.
        (&mut self.file).take(most.get().saturating_add(1)).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > most.get() { Err(InputError::TooLong { most }) } else { Ok(bytes) }
    }

    /// Reads the whole file as text.
    ///
    /// # Errors
    /// Those of [`InputFile::read`]; [`InputError::NoText`].
    pub fn read_text(self, most: Bytes) -> Result<String, InputError> {
        String::from_utf8(self.read(most)?).map_err(|error| InputError::NoText { at: error.utf8_error().valid_up_to() })
    }
}

/// Kind of a file that is not regular, with its article.
pub fn kind_name(kind: FileType) -> &'static str {
    match () {
        () if kind.is_dir() => "a folder",
        () if kind.is_fifo() => "a FIFO",
        () if kind.is_socket() => "a socket",
        () if kind.is_block_device() => "a block device",
        () if kind.is_char_device() => "a character device",
        () => "a file",
    }
}

fn open(path: &Path, is_taken: &dyn Fn(&File) -> bool) -> Result<InputFile, InputError> {
    let not_a_file = |kind| InputError::NotAFile { kind: kind_name(kind) };
    let before = fs::metadata(path)?.file_type();
    // Whether a FIFO has a name can only be seen once it is open.
    if !before.is_file() && !before.is_fifo() {
        return Err(not_a_file(before));
    }
    let file = File::options().read(true).custom_flags((OFlag::O_NONBLOCK | OFlag::O_NOCTTY).bits()).open(path)?;
    let metadata = file.metadata()?;
    let is_taken_fifo = metadata.file_type().is_fifo() && is_taken(&file);
    if !metadata.is_file() && !is_taken_fifo {
        return Err(not_a_file(metadata.file_type()));
    }
    // The open file is this process's own, even if the path names a descriptor of another process.
    fcntl(&file, FcntlArg::F_SETFL(OFlag::empty())).map_err(io::Error::from)?;
    Ok(InputFile { file, metadata })
}

fn is_nameless_pipe(file: &File) -> bool {
    let link = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
    link.is_ok_and(|link| link.as_os_str().as_encoded_bytes().starts_with(NAMELESS_PIPE.as_bytes()))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::fd::AsRawFd as _;
    use std::os::unix::net::UnixListener;

    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    use super::*;

    const MOST: Bytes = Bytes::new(8);

    #[test]
    fn other_kinds_of_files_are_refused_by_name_and_without_waiting() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (fifo, socket) = (folder.path().join("fifo"), folder.path().join("socket"));
        mkfifo(&fifo, Mode::S_IRWXU).expect("a FIFO");
        let _listener = UnixListener::bind(&socket).expect("a socket");
        let refused = |path: &Path| {
            let both = [InputFile::open(path), InputFile::open_stream(path)];
            both.map(|opened| opened.expect_err("refused").to_string())
        };
        for (path, kind) in [
            (folder.path(), "a folder"),
            (&fifo, "a FIFO"),
            (&socket, "a socket"),
            (Path::new("/dev/zero"), "a character device"),
        ] {
            let expected = format!("it is {kind}: name a file");
            assert_eq!(refused(path), [expected.clone(), expected]);
        }
        assert!(refused(&folder.path().join("none"))[0].contains("No such file"));
    }

    #[test]
    fn a_file_is_read_to_its_bound_and_no_further() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("file");
        fs::write(&path, "12345678").expect("written");
        assert_eq!(InputFile::open(&path).and_then(|file| file.read(MOST)).expect("it fits"), b"12345678");
        fs::write(&path, "123456789").expect("written");
        let long = InputFile::open(&path).and_then(|file| file.read(MOST)).expect_err("refused");
        assert_eq!(long.to_string(), "it is longer than the limit of 8 B");
        // A kernel file has size 0 until it is read.
        let grown = InputFile::open(Path::new("/proc/self/maps")).and_then(|file| file.read(MOST));
        assert!(matches!(grown, Err(InputError::TooLong { .. })), "{grown:?}");
        fs::write(&path, b"ab\xff").expect("written");
        let no_text = InputFile::open(&path).and_then(|file| file.read_text(MOST)).expect_err("refused");
        assert_eq!(no_text.to_string(), "it is not text: byte 2 is not UTF-8");
    }

    #[test]
    fn a_pipe_of_this_process_is_a_stream_and_not_a_file() {
        let (reader, mut writer) = io::pipe().expect("a pipe");
        let path = format!("/dev/fd/{}", reader.as_raw_fd());
        assert!(matches!(InputFile::open(Path::new(&path)), Err(InputError::NotAFile { kind: "a FIFO" })));
        let stream = InputFile::open_stream(Path::new(&path)).expect("it is opened");
        writer.write_all(b"1234").expect("written");
        drop(writer);
        assert_eq!(stream.read(MOST).expect("it ends"), b"1234");
    }
}
