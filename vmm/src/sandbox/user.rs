//! A change to another user than the one that started the process (setresuid(2)).
//!
//! Names are looked up only in `/etc/passwd` and `/etc/group`: the C library's own look-up loads other sources as
//! libraries, which a static program cannot.

use std::fmt;
use std::fs;
use std::str::FromStr;

use nix::unistd::{Gid, Uid, geteuid, setgroups, setresgid, setresuid};

use super::{SandboxError, call};

/// A user and a group, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct User {
    uid: Uid,
    gid: Gid,
}

/// The reasons why the process cannot change to a user.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UserError {
    /// The user does not exist.
    #[error("there is no user {0:?}: use a name of /etc/passwd, or a number and a group (UID:GID)")]
    NoUser(String),
    /// The group does not exist.
    #[error("there is no group {0:?}: use a name of /etc/group, or a number")]
    NoGroup(String),
    /// The user has no account, and no group was given.
    #[error("user {0} has no account, and so no group: write UID:GID")]
    NoGroupOf(u32),
    /// Only root may change the user.
    #[error("cannot become {0}: only root can become another user; start it as that user instead")]
    NotRoot(User),
}

impl fmt::Display for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.uid, self.gid)
    }
}

impl FromStr for User {
    type Err = UserError;

    /// Parses `NAME`, `UID`, or either with `:GROUP` or `:GID` appended.
    fn from_str(text: &str) -> Result<User, UserError> {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        User::parse(text, &read("/etc/passwd"), &read("/etc/group"))
    }
}

impl User {
    /// Parses `UID:GID` without looking up names.
    ///
    /// # Errors
    /// [`UserError`] for a name, and for a number without a group.
    pub fn from_numbers(text: &str) -> Result<User, UserError> {
        User::parse(text, "", "")
    }

    /// Parses like [`User::from_str`], with the text of passwd(5) and of group(5).
    fn parse(text: &str, passwd: &str, groups: &str) -> Result<User, UserError> {
        let (user, group) = text.split_once(':').map_or((text, None), |(user, group)| (user, Some(group)));
        let number = number(user);
        let account = passwd.lines().find_map(|line| account(line).filter(|found| found.is(user, number)));
        let uid = account.as_ref().map(|account| account.id).or(number);
        let uid = uid.ok_or_else(|| UserError::NoUser(user.to_owned()))?;
        let gid = match (group, account) {
            (Some(group), _) => gid_of(group, groups)?,
            (None, Some(Entry { group: Some(group), .. })) => group,
            (None, _) => return Err(UserError::NoGroupOf(uid)),
        };
        Ok(User { uid: Uid::from_raw(uid), gid: Gid::from_raw(gid) })
    }
}

/// A line of passwd(5), or of group(5), where lines begin the same way.
struct Entry<'a> {
    name: &'a str,
    id: u32,
    /// Main group of a user.
    group: Option<u32>,
}

impl Entry<'_> {
    fn is(&self, name: &str, number: Option<u32>) -> bool {
        self.name == name || number == Some(self.id)
    }
}

/// Parses a user or group number. The last number stands for no change (setresuid(2)), and is refused.
fn number(text: &str) -> Option<u32> {
    text.parse().ok().filter(|number| *number != u32::MAX)
}

/// Parses a line `NAME:PASSWORD:ID:GROUP:…`.
fn account(line: &str) -> Option<Entry<'_>> {
    let mut fields = line.split(':');
    let (name, _password, id) = (fields.next()?, fields.next()?, number(fields.next()?)?);
    Some(Entry { name, id, group: fields.next().and_then(number) })
}

fn gid_of(group: &str, groups: &str) -> Result<u32, UserError> {
    let number = number(group);
    let found = groups.lines().find_map(|line| account(line).filter(|found| found.is(group, number)));
    found.map(|found| found.id).or(number).ok_or_else(|| UserError::NoGroup(group.to_owned()))
}

/// Checks whether the process may change to this user.
pub(super) fn check(user: &User) -> Result<(), UserError> {
    if geteuid().is_root() || geteuid() == user.uid { Ok(()) } else { Err(UserError::NotRoot(*user)) }
}

/// Changes to `user`, for good: only its own group remains, and all three user ids change.
pub(super) fn become_user(user: &User, keeps_capabilities: bool) -> Result<(), SandboxError> {
    let cannot = |errno: nix::Error| call(format!("become user {user}"))(errno.into());
    if geteuid().is_root() {
        setgroups(&[user.gid]).map_err(cannot)?;
    }
    nix::sys::prctl::set_keepcaps(keeps_capabilities).map_err(cannot)?;
    setresgid(user.gid, user.gid, user.gid).map_err(cannot)?;
    setresuid(user.uid, user.uid, user.uid).map_err(cannot)?;
    // Otherwise its files in /proc belong to root (proc(5), `PR_SET_DUMPABLE`), and the manager could
    // not read them.
    nix::sys::prctl::set_dumpable(true).map_err(cannot)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\nguest:x:1001:1002::/:/bin/false\n";
    const GROUPS: &str = "root:x:0:\nkvm:x:36:guest\n";

    fn parsed(text: &str) -> Result<(u32, u32), UserError> {
        User::parse(text, PASSWD, GROUPS).map(|User { uid, gid }| (uid.as_raw(), gid.as_raw()))
    }

    #[test]
    fn a_user_is_a_name_or_a_number_and_so_is_a_group() {
        assert_eq!([parsed("guest"), parsed("1001")], [Ok((1001, 1002)), Ok((1001, 1002))]);
        assert_eq!(parsed("64999:64998"), Ok((64_999, 64_998)));
        assert_eq!(
            [parsed("guest:kvm"), parsed("guest:36"), parsed("7:kvm")],
            [Ok((1001, 36)), Ok((1001, 36)), Ok((7, 36))]
        );
    }

    #[test]
    fn the_error_names_an_unknown_user_or_group() {
        assert_eq!(parsed("no-such-user"), Err(UserError::NoUser("no-such-user".into())));
        assert_eq!(parsed("root:no-such-group"), Err(UserError::NoGroup("no-such-group".into())));
        assert_eq!(parsed("64999"), Err(UserError::NoGroupOf(64_999)));
        assert_eq!([parsed(""), parsed("-1")], ["", "-1"].map(|name| Err(UserError::NoUser(name.into()))));
        assert_eq!(parsed("4294967295:0"), Err(UserError::NoUser("4294967295".into())), "the process would stay root");
    }

    #[test]
    fn lines_without_an_account_are_skipped() {
        let passwd = "# comment\n\n+::::::\nhalf:x\nguest:x:many:1::/:\nguest:x:5:6::/:\n";
        assert_eq!(User::parse("guest", passwd, ""), Ok(User { uid: Uid::from_raw(5), gid: Gid::from_raw(6) }));
    }
}
