//! Free pages that are kept for domains that are about to start, as the daemon reports them.
//!
//! ```text
//!   a daemon answers ────────────▶ its rooms
//!   none listens ────────────────▶ the last daemon's state file, as far as its rooms are still kept; no file: no rooms
//!   anything else ───────────────▶ unknown, and nothing is released
//! ```

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Deserialize;
use wideleaf_control::client::{self, ClientError};
use wideleaf_control::protocol::{Answer, Request, RoomView};
use wideleaf_policies::PageSize;

/// Time for which a daemon keeps room for a domain that does not come. A file may be older than that, and than this
/// boot.
const KEPT_MAX: Duration = Duration::from_secs(120);

/// Places of the information about kept pages.
pub struct KeptPages {
    socket: PathBuf,
    state: PathBuf,
}

/// The part of the state file that is read.
#[derive(Deserialize)]
struct State {
    rooms: Vec<StateRoom>,
}

#[derive(Deserialize)]
struct StateRoom {
    #[serde(flatten)]
    room: RoomView,
    made_at_s: u64,
}

impl KeptPages {
    /// Places under that root, or at that socket.
    pub fn at(root: &Path, socket: Option<&Path>) -> KeptPages {
        let socket = socket.map_or_else(|| root.join("run/wideleaf/control.sock"), Path::to_owned);
        KeptPages { socket, state: root.join("var/lib/wideleaf/state.json") }
    }

    /// Number of kept pages of that size that may be on that node.
    ///
    /// # Errors
    /// One line: the number is unknown.
    pub fn pages(&self, size: PageSize, node: Option<u32>) -> Result<u64, String> {
        let kept = |room: &RoomView| room.kept(size.bytes().get(), node);
        Ok(self.rooms()?.iter().map(kept).fold(0, u64::saturating_add))
    }

    fn rooms(&self) -> Result<Vec<RoomView>, String> {
        let unknown = |why: String| format!("cannot determine the pages that are kept for starting domains ({why})");
        match client::ask(&self.socket, Request::Rooms) {
            Ok(Answer::Rooms(rooms)) => Ok(rooms),
            Ok(_) => Err(unknown("wideleafd answered another question".into())),
            Err(ClientError::NoDaemon { .. }) => self.rooms_of_the_last_one().map_err(unknown),
            Err(error) => Err(unknown(error.to_string())),
        }
    }

    fn rooms_of_the_last_one(&self) -> Result<Vec<RoomView>, String> {
        let at = |error: &dyn std::fmt::Display| format!("{}: {error}", self.state.display());
        let bytes = match fs::read(&self.state) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(at(&error)),
        };
        let state: State = serde_json::from_slice(&bytes).map_err(|error| at(&error))?;
        let now_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let is_kept = |room: &StateRoom| now_s.saturating_sub(room.made_at_s) <= KEPT_MAX.as_secs();
        Ok(state.rooms.into_iter().filter(is_kept).map(|room| room.room).collect())
    }
}
