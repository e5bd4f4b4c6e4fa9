//! The order in which a restored guest first touched its memory, kept beside the snapshot for the next restore (as
//! REAP does: Ustiugov et al., ASPLOS '21).
//!
//! ```text
//!   --prefetch record ──▶ opened before the sandbox ─▶ the guest runs ─▶ FOLDER/touches, at the end of the run
//!   --prefetch use    ──▶ FOLDER/touches, if it is there ─▶ these windows first
//! ```
//!
//! The order is a hint. One that is damaged, or of another snapshot, is left out with a warning.
//!
//! A folder from elsewhere may have anything in that place: only a regular file without another name is written. The
//! older order stays until the new one is there. The sandbox has neither names in the folder nor `ftruncate(2)`, so the
//! new order is written over the older one, and spaces over the rest of it.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use nix::fcntl::OFlag;
use serde::{Deserialize, Serialize};
use wideleaf_memory::input_file::kind_name;
use wideleaf_policies::units::mib;
use wideleaf_policies::{Bytes, WindowIndex};
use wideleaf_snapshot::{Opened, TOUCHES_FILE};

use crate::failure::Failure;

/// Longest file that is read or written: more than a number for each window of 16 TiB.
const FILE_BYTES_MAX: Bytes = mib(128);

/// Rights of a new file: as those of the snapshot's other files.
const FILE_MODE: u32 = 0o600;

/// Content of the file.
#[derive(Debug, Deserialize, Serialize)]
struct Touches {
    /// Id of the snapshot.
    snapshot: String,
    /// Windows by their first touch.
    windows: Vec<u64>,
}

/// The recorded order; empty without a usable one.
pub(super) fn read(folder: &Path, snapshot: &Opened) -> Vec<WindowIndex> {
    let path = folder.join(TOUCHES_FILE);
    match read_from(&path, &snapshot.id().to_string()) {
        // Only windows that are stored can be read first.
        Ok(windows) => windows.into_iter().filter(|window| snapshot.window(*window).is_some()).collect(),
        Err(why) => {
            tracing::warn!("{} is not used: {why}", path.display());
            Vec::new()
        }
    }
}

fn read_from(path: &Path, snapshot: &str) -> io::Result<Vec<WindowIndex>> {
    let file = match open(path, File::options().read(true)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        file => file?,
    };
    let mut text = String::new();
    file.take(FILE_BYTES_MAX.get()).read_to_string(&mut text)?;
    // A run that was killed has recorded nothing.
    if text.is_empty() {
        return Ok(Vec::new());
    }
    let Touches { snapshot: of, windows } = serde_json::from_str(&text)?;
    if of != snapshot {
        return Err(io::Error::other("it is of another snapshot"));
    }
    Ok(windows.into_iter().map(WindowIndex::new).collect())
}

/// Opens a regular file of at most [`FILE_BYTES_MAX`], not through a symbolic link and without waiting. The kind is
/// looked at before, too: opening a device may have an effect.
fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    if let Ok(there) = fs::symlink_metadata(path) {
        check(&there)?;
    }
    let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
    let file = options.custom_flags(flags.bits()).open(path)?;
    check(&file.metadata()?)?;
    Ok(file)
}

fn check(there: &Metadata) -> io::Result<()> {
    let kind = there.file_type();
    let problem = match () {
        () if kind.is_symlink() => "a symbolic link",
        () if !kind.is_file() => kind_name(kind),
        () if there.len() > FILE_BYTES_MAX.get() => "longer than 128 MiB",
        () => return Ok(()),
    };
    Err(io::Error::other(format!("it is {problem}")))
}

/// An order that is being recorded.
#[derive(Debug)]
pub(super) struct Recording {
    file: File,
    snapshot: String,
}

impl Recording {
    /// Opens the file, and makes an empty one if it is missing. Its content stays until the end of the run.
    pub fn open(folder: &Path, snapshot: &Opened) -> Result<Recording, Failure> {
        let path = folder.join(TOUCHES_FILE);
        let file = Recording::open_file(&path).map_err(|error| {
            // An error of the kernel is not mended by that.
            let remedy = if error.raw_os_error().is_none() { "remove it, or omit" } else { "omit" };
            let path = path.display();
            Failure::Output(format!("cannot record first touches in {path}: {error}; {remedy} --prefetch record"))
        })?;
        Ok(Recording { file, snapshot: snapshot.id().to_string() })
    }

    fn open_file(path: &Path) -> io::Result<File> {
        let file = open(path, File::options().write(true).create(true).truncate(false).mode(FILE_MODE))?;
        if file.metadata()?.nlink() > 1 {
            return Err(io::Error::other("it has another name as well (a hard link)"));
        }
        Ok(file)
    }

    /// Writes the order over the older one. Called once.
    pub fn write(&self, windows: &[WindowIndex]) -> io::Result<()> {
        let windows = windows.iter().map(|window| window.get()).collect();
        let mut text = serde_json::to_vec(&Touches { snapshot: self.snapshot.clone(), windows })?;
        let older = self.file.metadata()?.len().min(FILE_BYTES_MAX.get()) as usize;
        text.resize(text.len().max(older), b' ');
        (&self.file).write_all(&text)
    }
}

#[cfg(test)]
mod tests {
    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    use super::*;

    fn windows(indexes: &[u64]) -> Vec<WindowIndex> {
        indexes.iter().copied().map(WindowIndex::new).collect()
    }

    fn recording(path: &Path) -> io::Result<Recording> {
        Ok(Recording { file: Recording::open_file(path)?, snapshot: "a".to_owned() })
    }

    #[test]
    fn an_older_order_stays_until_the_new_one_is_there_and_nothing_of_it_is_left_then() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join(TOUCHES_FILE);
        let longer = windows(&[1 << 20, 1 << 21, 1 << 22]);
        recording(&path).and_then(|first| first.write(&longer)).expect("a new file");
        drop(recording(&path).expect("the same file"));
        assert_eq!(read_from(&path, "a").expect("it is whole"), longer);
        recording(&path).and_then(|second| second.write(&windows(&[7]))).expect("the same file");
        assert_eq!(read_from(&path, "a").expect("it is whole"), windows(&[7]));
        assert!(read_from(&path, "b").expect_err("of another snapshot").to_string().contains("another snapshot"));
        assert_eq!(path.metadata().expect("it is there").mode() & 0o777, FILE_MODE);
    }

    #[test]
    fn only_a_regular_file_without_another_name_is_written_and_no_link_is_followed() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let place = |name: &str| folder.path().join(name);
        fs::write(place("precious"), "bytes").expect("written");
        std::os::unix::fs::symlink("precious", place("link")).expect("a link");
        std::os::unix::fs::symlink("none", place("dangling")).expect("a link");
        mkfifo(&place("fifo"), Mode::S_IRWXU).expect("a FIFO");
        fs::hard_link(place("precious"), place("second")).expect("a second name");
        File::create(place("long")).and_then(|file| file.set_len(1 << 40)).expect("a file with a hole");
        for (name, problem) in [
            ("link", "it is a symbolic link"),
            ("dangling", "it is a symbolic link"),
            ("fifo", "it is a FIFO"),
            ("long", "it is longer than 128 MiB"),
        ] {
            assert_eq!(recording(&place(name)).expect_err(name).to_string(), problem);
            assert_eq!(read_from(&place(name), "a").expect_err(name).to_string(), problem);
        }
        assert!(recording(&place("second")).expect_err("two names").to_string().contains("a hard link"));
        assert_eq!(fs::read(place("precious")).expect("it is there"), b"bytes");
        assert!(!place("none").exists());
        assert_eq!(read_from(&place("none"), "a").expect("without a file there is no order"), []);
    }
}
