//! The daemon's state across restarts, also after a crash.
//!
//! ```text
//!   state.json.new ── write, fsync ──▶ rename ──▶ state.json ── fsync of the folder
//!   an unreadable state.json ── rename ──▶ state.json.damaged, and an empty one begins
//! ```
//!
//! A reader sees the old file or the new one, never half of one (rename(2)).

use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use wideleaf_control::protocol::Settings;
use wideleaf_control::view::WorkView;
use wideleaf_memory::input_file::{InputError, InputFile};
use wideleaf_policies::Bytes;
use wideleaf_policies::units::mib;

use crate::guests::ProcessId;
use crate::pool_reservations::Room;

/// Version of the file. A file of another version is moved aside like a damaged one, since its meaning is unknown.
pub const VERSION: u32 = 1;

/// Upper bound on the file: some KiB for each of thousands of VMs.
const FILE_MAX: Bytes = mib(64);

/// Content of the state file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Version of the content, [`VERSION`].
    pub version: u32,
    /// Guests under management.
    pub guests: Vec<Remembered>,
    /// Guests that an operator detached, which must not be taken again automatically.
    pub left: Vec<ProcessId>,
    /// Room that was made in the pools.
    pub rooms: Vec<Room>,
    /// Mistakes in the metadata of running domains, a line each.
    #[serde(default)]
    pub mistakes: Vec<(ProcessId, Vec<String>)>,
    /// Nova's flavors of running domains.
    #[serde(default)]
    pub flavors: Vec<(ProcessId, String)>,
    /// Settings of registered VMs over the socket.
    #[serde(default)]
    pub registered: Vec<(ProcessId, Settings)>,
}

/// Record of a guest under management.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Remembered {
    /// Process of the guest.
    pub process: ProcessId,
    /// Name of the guest then.
    pub name: String,
    /// Settings over the socket or from metadata.
    pub said: Settings,
    /// Counters of its managers.
    pub work: WorkView,
    /// Time until which a client asked to leave it alone, in seconds since the epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left_alone_until_s: Option<u64>,
}

/// State of the file at the start.
#[derive(Debug, PartialEq)]
pub enum Loaded {
    /// There was no file.
    Fresh,
    /// The file has this state.
    Known(State),
    /// The file was moved aside.
    Damaged {
        /// New path of the file.
        aside: PathBuf,
        /// Mistake in the file.
        why: String,
    },
}

/// Reads the file.
///
/// # Errors
/// The kernel's error for a file that can be neither read nor moved aside.
pub fn load(path: &Path) -> io::Result<Loaded> {
    let bytes = match InputFile::open(path).and_then(|file| file.read(FILE_MAX)) {
        Ok(bytes) => bytes,
        Err(InputError::Io(error)) if error.kind() == io::ErrorKind::NotFound => return Ok(Loaded::Fresh),
        Err(error) => return Err(error.into()),
    };
    let why = match serde_json::from_slice::<State>(&bytes) {
        Ok(state) if state.version == VERSION => return Ok(Loaded::Known(state)),
        Ok(state) => format!("it has version {}, this wideleafd reads {VERSION}", state.version),
        Err(error) => error.to_string(),
    };
    let aside = with_suffix(path, ".damaged");
    fs::rename(path, &aside)?;
    Ok(Loaded::Damaged { aside, why })
}

/// Writes the file, all or nothing. When it returns, the state survives a crash of the host.
///
/// # Errors
/// The kernel's error; the file is as it was.
pub fn save(path: &Path, state: &State) -> io::Result<()> {
    let new = with_suffix(path, ".new");
    let mut file = File::create(&new)?;
    file.write_all(&serde_json::to_vec(state)?)?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder)?.sync_all()
}

/// Keeps other daemons from this state as long as the file lives.
///
/// # Errors
/// [`TryLockError::WouldBlock`] where another daemon holds it, or the kernel's error.
pub fn claim(path: &Path) -> Result<File, TryLockError> {
    let file = File::create(with_suffix(path, ".lock")).map_err(TryLockError::Error)?;
    file.try_lock().map(|()| file)
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_daemon_has_a_state_at_a_time() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("state.json");
        let first = claim(&path).expect("no daemon holds it");
        assert!(matches!(claim(&path), Err(TryLockError::WouldBlock)));
        drop(first);
        claim(&path).expect("it was let go");
    }

    use proptest::prelude::*;

    fn state(pid: u32) -> State {
        let process = ProcessId { pid, started_at: 7 };
        let said = Settings { policy: Some("off".into()), ..Settings::default() };
        let (name, work) = ("web".into(), WorkView::default());
        let guest = Remembered { process, name, said, work, left_alone_until_s: Some(9) };
        State { version: VERSION, guests: vec![guest], left: vec![process], ..State::default() }
    }

    #[test]
    fn a_saved_state_is_loaded_and_no_other_file_is_left() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("state.json");
        assert_eq!(load(&path).expect("no file is no error"), Loaded::Fresh);
        for pid in [1, 2] {
            save(&path, &state(pid)).expect("saved");
            assert_eq!(load(&path).expect("loaded"), Loaded::Known(state(pid)));
        }
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1);
    }

    #[test]
    fn a_state_of_another_version_is_moved_aside() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("state.json");
        save(&path, &State { version: 2, ..state(1) }).expect("saved");
        let Loaded::Damaged { aside, why } = load(&path).expect("it can be put aside") else {
            panic!("it has version 2")
        };
        assert_eq!(why, "it has version 2, this wideleafd reads 1");
        assert!(aside.exists() && !path.exists());
    }

    proptest! {
        #[test]
        fn any_other_bytes_are_moved_aside_and_kept(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let folder = tempfile::tempdir().expect("a temporary folder");
            let path = folder.path().join("state.json");
            fs::write(&path, &bytes).expect("written");
            match load(&path) {
                Ok(Loaded::Damaged { aside, .. }) => prop_assert_eq!(fs::read(aside).expect("kept"), bytes),
                other => panic!("{other:?}"),
            }
        }

        #[test]
        fn a_truncated_file_counts_as_damaged(keep in 0..100_usize) {
            let folder = tempfile::tempdir().expect("a temporary folder");
            let path = folder.path().join("state.json");
            let whole = serde_json::to_vec(&state(1)).expect("JSON");
            fs::write(&path, &whole[..whole.len() * keep / 100]).expect("written");
            let is_damaged = matches!(load(&path), Ok(Loaded::Damaged { .. }));
            prop_assert!(is_damaged);
        }
    }
}
