//! Permissions of clients. The socket's mode and group decide which users may connect, and every client may read.
//! Root, the daemon's own user and the configured group may also make changes.

use std::path::{Path, PathBuf};

pub use wideleaf_control::peer::Peer;
use wideleaf_control::protocol::Request;

/// Users that may make changes.
#[derive(Clone, Debug)]
pub struct Access {
    own_uid: u32,
    group: Option<String>,
    etc: PathBuf,
}

impl Access {
    /// Root, the user of this process, and the members of `group` according to `/etc/group`.
    pub fn new(group: Option<String>) -> Access {
        Access::with_files(group, nix::unistd::geteuid().as_raw(), "/etc")
    }

    /// As [`Access::new`] with another user, and with `passwd` and `group` in another folder.
    pub fn with_files(group: Option<String>, own_uid: u32, etc: impl Into<PathBuf>) -> Access {
        Access { own_uid, group, etc: etc.into() }
    }

    /// Whether `peer` may make changes.
    ///
    /// Membership is looked up by user, in the files: the process id may belong to another process by now, with
    /// other groups. (Static binaries have no other source of users either.)
    pub fn may_change(&self, peer: Peer) -> bool {
        peer.uid == 0 || peer.uid == self.own_uid || self.is_member(peer)
    }

    fn is_member(&self, peer: Peer) -> bool {
        let Some((gid, members)) = self.group.as_deref().and_then(|name| group(&self.etc, name)) else { return false };
        let user = user_name(&self.etc, peer.uid);
        gid == peer.gid || user.is_some_and(|user| members.contains(&user))
    }

    /// The number of the configured group; `None` where none is configured.
    ///
    /// # Errors
    /// One line where it does not exist.
    pub fn gid(&self) -> Result<Option<u32>, String> {
        let Some(name) = self.group.as_deref() else { return Ok(None) };
        match group(&self.etc, name) {
            Some((gid, _)) => Ok(Some(gid)),
            None => Err(format!(
                "there is no group {name:?}: make it with `groupadd --system {name}`, or leave socket.group out"
            )),
        }
    }
}

/// Number and members of a group (group(5)).
fn group(etc: &Path, name: &str) -> Option<(u32, Vec<String>)> {
    let text = std::fs::read_to_string(etc.join("group")).ok()?;
    text.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next()? == name).then_some(())?;
        let gid = fields.nth(1)?.parse().ok()?;
        let members = fields.next().unwrap_or_default().split(',').map(|member| member.trim().to_owned());
        Some((gid, members.filter(|member| !member.is_empty()).collect()))
    })
}

/// Name of a user (passwd(5)).
fn user_name(etc: &Path, uid: u32) -> Option<String> {
    let text = std::fs::read_to_string(etc.join("passwd")).ok()?;
    text.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(uid)).then(|| name.to_owned())
    })
}

/// Whether a request changes nothing.
pub fn is_reading(request: &Request) -> bool {
    match request {
        Request::Daemon
        | Request::List
        | Request::Rooms
        | Request::Info { .. }
        | Request::Explain { .. }
        | Request::Windows { .. } => true,
        Request::Set { .. }
        | Request::Attach { .. }
        | Request::Detach { .. }
        | Request::LeaveAlone { .. }
        | Request::Reload
        | Request::Register { .. }
        | Request::Status { .. }
        | Request::Prepare { .. }
        | Request::Started { .. }
        | Request::Release { .. } => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(group: Option<&str>) -> (tempfile::TempDir, Access) {
        let etc = tempfile::tempdir().expect("a temporary folder");
        std::fs::write(etc.path().join("passwd"), "root:x:0:0::/:\nann:x:1000:100::/:\nbob:x:1001:100::/:\n")
            .expect("passwd");
        std::fs::write(etc.path().join("group"), "users:x:100:\nwideleaf:x:77:ann,eve\nbroken\n").expect("group");
        let access = Access::with_files(group.map(str::to_owned), 500, etc.path());
        (etc, access)
    }

    fn peer(uid: u32, gid: u32) -> Peer {
        Peer { pid: 1, uid, gid }
    }

    #[test]
    fn only_root_the_own_user_and_members_of_the_group_may_make_changes() {
        let (_etc, access) = access(Some("wideleaf"));
        let may = [peer(0, 0), peer(500, 500), peer(1000, 100), peer(2000, 77)].map(|peer| access.may_change(peer));
        assert_eq!(may, [true; 4]);
        assert!(!access.may_change(peer(1001, 100))); // bob: of the users only
        assert!(!access.may_change(peer(4242, 4242))); // not even in passwd
    }

    #[test]
    fn without_a_configured_group_membership_has_no_effect() {
        let (_etc, access) = access(None);
        assert!(!access.may_change(peer(1000, 77)));
        assert_eq!(access.gid(), Ok(None));
    }

    #[test]
    fn a_group_that_does_not_exist_is_named() {
        let (_etc, access) = access(Some("no-such-group"));
        assert!(access.gid().expect_err("no such group").contains("groupadd --system no-such-group"));
        assert!(!access.may_change(peer(1000, 100)));
    }
}
