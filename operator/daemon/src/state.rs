//! What the daemon remembers across its own end, however that comes.
//!
//! ```text
//!   state.json.new ── write, fsync ──▶ rename ──▶ state.json ── fsync of the folder
//!   state.json that makes no sense ── rename ──▶ state.json.damaged, and an empty one is begun
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
use crate::rooms::Room;

/// Of the file. One of another version is put aside as a damaged one is: what it says can not be known.
pub const VERSION: u32 = 1;

/// The longest state that is read: some KiB for each of thousands of VMs.
const FILE_MAX: Bytes = mib(64);

/// All that is remembered.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// [`VERSION`].
    pub version: u32,
    /// Guests under management.
    pub guests: Vec<Remembered>,
    /// Guests that somebody detached, which are not to be taken again by themselves.
    pub left: Vec<ProcessId>,
    /// Room that was made in the pools.
    pub rooms: Vec<Room>,
    /// What is wrong in the metadata of domains that run, a line each.
    #[serde(default)]
    pub mistakes: Vec<(ProcessId, Vec<String>)>,
}

/// A guest under management.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Remembered {
    /// Its process.
    pub process: ProcessId,
    /// Its name then.
    pub name: String,
    /// What was said of it over the socket.
    pub said: Settings,
    /// What was counted.
    pub work: WorkView,
}

/// What was found at the start.
#[derive(Debug, PartialEq)]
pub enum Loaded {
    /// There was no file.
    Fresh,
    /// What it says.
    Known(State),
    /// The file was put aside.
    Damaged {
        /// Where to.
        aside: PathBuf,
        /// What was wrong with it.
        why: String,
    },
}

/// Reads the file.
///
/// # Errors
/// The kernel's answer where there is a file and it can be neither read nor put aside.
pub fn load(path: &Path) -> io::Result<Loaded> {
    let bytes = match InputFile::open(path).and_then(|file| file.read(FILE_MAX)) {
        Ok(bytes) => bytes,
        Err(InputError::Io(error)) if error.kind() == io::ErrorKind::NotFound => return Ok(Loaded::Fresh),
        Err(error) => return Err(error.into()),
    };
    let why = match serde_json::from_slice::<State>(&bytes) {
        Ok(state) if state.version == VERSION => return Ok(Loaded::Known(state)),
        Ok(state) => format!("it is of version {}, this wideleafd knows {VERSION}", state.version),
        Err(error) => error.to_string(),
    };
    let aside = with_suffix(path, ".damaged");
    fs::rename(path, &aside)?;
    Ok(Loaded::Damaged { aside, why })
}

/// Writes the file, all or nothing. When it returns, the state survives a crash of the host.
///
/// # Errors
/// The kernel's answer; the file is as it was.
pub fn save(path: &Path, state: &State) -> io::Result<()> {
    let new = with_suffix(path, ".new");
    let mut file = File::create(&new)?;
    file.write_all(&serde_json::to_vec(state)?)?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder)?.sync_all()
}

/// Keeps other daemons from this state for as long as the file lives.
///
/// # Errors
/// [`TryLockError::WouldBlock`] where another has it, or the kernel's answer.
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
        let first = claim(&path).expect("nobody has it");
        assert!(matches!(claim(&path), Err(TryLockError::WouldBlock)));
        drop(first);
        claim(&path).expect("it was let go");
    }

    use proptest::prelude::*;

    fn state(pid: u32) -> State {
        let process = ProcessId { pid, started_at: 7 };
        let said = Settings { policy: Some("off".into()), ..Settings::default() };
        let guest = Remembered { process, name: "web".into(), said, work: WorkView::default() };
        State { version: VERSION, guests: vec![guest], left: vec![process], ..State::default() }
    }

    #[test]
    fn what_is_saved_is_loaded_and_nothing_else_is_left() {
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
    fn another_version_is_put_aside() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("state.json");
        save(&path, &State { version: 2, ..state(1) }).expect("saved");
        let Loaded::Damaged { aside, why } = load(&path).expect("it can be put aside") else {
            panic!("it is of version 2")
        };
        assert_eq!(why, "it is of version 2, this wideleafd knows 1");
        assert!(aside.exists() && !path.exists());
    }

    proptest! {
        #[test]
        fn any_bytes_are_put_aside_and_kept(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let folder = tempfile::tempdir().expect("a temporary folder");
            let path = folder.path().join("state.json");
            fs::write(&path, &bytes).expect("written");
            match load(&path) {
                Ok(Loaded::Damaged { aside, .. }) => prop_assert_eq!(fs::read(aside).expect("kept"), bytes),
                other => panic!("{other:?}"),
            }
        }

        #[test]
        fn a_file_that_was_cut_off_is_no_state(keep in 0..100_usize) {
            let folder = tempfile::tempdir().expect("a temporary folder");
            let path = folder.path().join("state.json");
            let whole = serde_json::to_vec(&state(1)).expect("JSON");
            fs::write(&path, &whole[..whole.len() * keep / 100]).expect("written");
            let is_damaged = matches!(load(&path), Ok(Loaded::Damaged { .. }));
            prop_assert!(is_damaged);
        }
    }
}
