//! Files that a user named, to be read: opened without waiting, and read no further than a bound.
//!
//! ```text
//!   a regular file                        opened
//!   a pipe that this process has already  opened by `open_stream`: /dev/stdin, <(command) in a shell
//!   a folder, a FIFO, a device, a socket  refused, and named: a FIFO may never begin, a device may never end
//! ```
//!
//! What a path names is asked before it is opened, for opening a device may have an effect (a watchdog starts, a tape
//! rewinds). It is asked
//! again of what was opened (`fstat(2)`), and nothing is opened in a way that waits (`O_NONBLOCK`): the path may lead
//! elsewhere meanwhile.

use std::fs::{self, File, FileType, Metadata};
use std::io::{self, Read as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use wideleaf_policies::Bytes;

/// How the link in `/proc/self/fd` to a pipe without a name begins (proc(5)).
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
    /// The path names something else.
    #[error("it is {kind}: name a file")]
    NotAFile {
        /// What it is, with its article.
        kind: &'static str,
    },
    /// It has more bytes than its reader takes.
    #[error("it has more than the {most} that are read of it")]
    TooLong {
        /// The reader's bound.
        most: Bytes,
    },
    /// Its bytes are no text.
    #[error("it is no text: byte {at} is not UTF-8")]
    NoText {
        /// Offset of the first byte that is not.
        at: usize,
    },
    /// The kernel's answer.
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

    /// Opens a regular file, or a pipe that this process has under another number. Reading a pipe waits for its writer.
    ///
    /// # Errors
    /// [`InputError::NotAFile`], [`InputError::Io`].
    pub fn open_stream(path: &Path) -> Result<InputFile, InputError> {
        open(path, &|file| is_nameless_pipe(file))
    }

    /// Size when it was opened; 0 of a pipe, and of a file of the kernel's that is made when it is read.
    pub fn bytes(&self) -> Bytes {
        Bytes::new(self.metadata.len())
    }

    /// The file itself, for what is read piece by piece.
    pub fn into_file(self) -> File {
        self.file
    }

    /// The whole file.
    ///
    /// # Errors
    /// [`InputError::TooLong`] beyond `most`, before it is read where its size says so; [`InputError::Io`].
    pub fn read(mut self, most: Bytes) -> Result<Vec<u8>, InputError> {
        if self.bytes() > most {
            return Err(InputError::TooLong { most });
        }
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(self.bytes().as_usize()).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        // One byte more shows that there is one.
        (&mut self.file).take(most.get().saturating_add(1)).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > most.get() { Err(InputError::TooLong { most }) } else { Ok(bytes) }
    }

    /// The whole file as text.
    ///
    /// # Errors
    /// As of [`InputFile::read`]; [`InputError::NoText`].
    pub fn read_text(self, most: Bytes) -> Result<String, InputError> {
        String::from_utf8(self.read(most)?).map_err(|error| InputError::NoText { at: error.utf8_error().valid_up_to() })
    }
}

/// What a file is that is no regular file, with its article.
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
    // Of a FIFO only its open file tells whether it has a name.
    if !before.is_file() && !before.is_fifo() {
        return Err(not_a_file(before));
    }
    let file = File::options().read(true).custom_flags((OFlag::O_NONBLOCK | OFlag::O_NOCTTY).bits()).open(path)?;
    let metadata = file.metadata()?;
    let is_taken_fifo = metadata.file_type().is_fifo() && is_taken(&file);
    if !metadata.is_file() && !is_taken_fifo {
        return Err(not_a_file(metadata.file_type()));
    }
    // The open file is this process's own, also where the path is a number of another.
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
    fn what_is_no_file_is_refused_by_what_it_is_and_not_waited_for() {
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
        assert_eq!(long.to_string(), "it has more than the 8 B that are read of it");
        // A file of the kernel's has size 0 until it is read.
        let grown = InputFile::open(Path::new("/proc/self/maps")).and_then(|file| file.read(MOST));
        assert!(matches!(grown, Err(InputError::TooLong { .. })), "{grown:?}");
        fs::write(&path, b"ab\xff").expect("written");
        let no_text = InputFile::open(&path).and_then(|file| file.read_text(MOST)).expect_err("refused");
        assert_eq!(no_text.to_string(), "it is no text: byte 2 is not UTF-8");
    }

    #[test]
    fn a_pipe_of_this_process_is_a_stream_and_no_file() {
        let (reader, mut writer) = io::pipe().expect("a pipe");
        let path = format!("/dev/fd/{}", reader.as_raw_fd());
        assert!(matches!(InputFile::open(Path::new(&path)), Err(InputError::NotAFile { kind: "a FIFO" })));
        let stream = InputFile::open_stream(Path::new(&path)).expect("it is opened");
        writer.write_all(b"1234").expect("written");
        drop(writer);
        assert_eq!(stream.read(MOST).expect("it ends"), b"1234");
    }
}
