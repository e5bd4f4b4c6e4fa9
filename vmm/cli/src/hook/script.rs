//! The script that libvirt runs: what is in it, how it gets to its place and away again.
//!
//! ```text
//!   #!/bin/sh
//!   # wideleaf hook: written by `wideleaf hook install`, taken away by `wideleaf hook uninstall`
//!   [ ! -x PROGRAM ] || PROGRAM hook run -- "$@" >/dev/null || [ "$2:$?" != prepare:4 ]
//! ```
//!
//! It outlives every version of the program, and the program itself: where that is gone, crashes or is killed, the guest starts all
//! the same. Only a deliberate refusal (exit code 4 of `prepare`) is passed on; at `reconnect` libvirtd would kill the
//! guest for it. A script rather than a link: libvirt tells its hooks by argument what happens, not who is to handle it.

use std::fs::{self, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;
use wideleaf_control::protocol::SOCKET_PATH;

use crate::failure::Failure;
use crate::output::print;

/// How the second line of each of our scripts begins, in every version.
const MARK: &str = "# wideleaf hook:";
/// Anybody may read it, and libvirtd runs it.
const MODE: u32 = 0o755;
/// What libvirt's package makes.
const LIBVIRT: &str = "etc/libvirt";

/// Where the script is under this root; libvirt runs all of `qemu.d` since version 6.5.
pub fn path(root: &Path) -> PathBuf {
    root.join(LIBVIRT).join("hooks/qemu.d/wideleaf")
}

/// What `install` would write now.
///
/// # Errors
/// [`Failure::Host`] where this program has no path that a script can name.
pub fn text(socket: &Path) -> Result<String, Failure> {
    let program = std::env::current_exe().map_err(|error| Failure::Host(format!("where is this program? {error}")))?;
    let program = quoted(&program)?;
    let option =
        if socket == Path::new(SOCKET_PATH) { String::new() } else { format!("--socket {} ", quoted(socket)?) };
    Ok(format!(
        "#!/bin/sh\n\
         {MARK} written by `wideleaf hook install`, taken away by `wideleaf hook uninstall`\n\
         [ ! -x {program} ] || {program} hook run {option}-- \"$@\" >/dev/null || [ \"$2:$?\" != prepare:4 ]\n"
    ))
}

/// As one word of a shell.
fn quoted(path: &Path) -> Result<String, Failure> {
    let text = path.to_str().filter(|text| !text.contains('\n'));
    let text = text.ok_or_else(|| Failure::Host(format!("{path:?} can not be named in a script")))?;
    Ok(format!("'{}'", text.replace('\'', r"'\''")))
}

/// What is where the script belongs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// Nothing.
    Nothing,
    /// A script of ours, of this version or another.
    Ours(String),
    /// A file that somebody else wrote.
    Foreign,
}

/// Looks there.
///
/// # Errors
/// [`Failure::Host`] where it can not be read.
pub fn find(root: &Path) -> Result<Found, Failure> {
    let path = path(root);
    match fs::read(&path).map(String::from_utf8) {
        Ok(Ok(text)) if text.lines().nth(1).is_some_and(|line| line.starts_with(MARK)) => Ok(Found::Ours(text)),
        Ok(_) => Ok(Found::Foreign),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Found::Nothing),
        Err(error) => Err(at(&path)(error)),
    }
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> Failure {
    let path = path.display().to_string();
    move |error| Failure::Host(format!("{path}: {error}"))
}

fn foreign(root: &Path) -> Failure {
    Failure::Host(format!("{} is not ours: move it away, libvirt runs every file in that folder", path(root).display()))
}

/// Writes the script.
///
/// # Errors
/// [`Failure::Host`] where libvirt is absent, or the place is taken.
pub fn install(root: &Path, socket: &Path, is_dry: bool) -> Result<(), Failure> {
    let (path, text) = (path(root), text(socket)?);
    let libvirt = root.join(LIBVIRT);
    if !libvirt.is_dir() {
        return Err(Failure::Host(format!("there is no {}: is libvirt installed?", libvirt.display())));
    }
    let is_executable = fs::metadata(&path).is_ok_and(|file| file.permissions().mode() & 0o111 != 0);
    match find(root)? {
        Found::Foreign => return Err(foreign(root)),
        Found::Ours(old) if old == text && is_executable => {
            return print(&format!("{} is there already\n", path.display()));
        }
        Found::Ours(_) | Found::Nothing => {}
    }
    if is_dry {
        return print(&format!("would write {}:\n{text}", path.display()));
    }
    write(&path, &text).map_err(at(&path))?;
    print(&format!("wrote {}; `wideleaf hook status` says whether libvirtd runs it\n", path.display()))
}

/// Puts the whole script in its place at once. It is made in the folder above: whatever is executable in `qemu.d` is run.
fn write(path: &Path, text: &str) -> io::Result<()> {
    let folder = path.parent().unwrap_or(path);
    fs::create_dir_all(folder)?;
    let mut file = NamedTempFile::new_in(folder.parent().unwrap_or(folder))?;
    file.write_all(text.as_bytes())?;
    file.as_file().set_permissions(Permissions::from_mode(MODE))?;
    file.persist(path).map(drop).map_err(|error| error.error)
}

/// Takes the script away. Folders stay: libvirt's package may have made them.
///
/// # Errors
/// [`Failure::Host`] where what is there is not ours.
pub fn uninstall(root: &Path, is_dry: bool) -> Result<(), Failure> {
    let path = path(root);
    match find(root)? {
        Found::Nothing => print(&format!("there is no {}\n", path.display())),
        Found::Foreign => Err(foreign(root)),
        Found::Ours(_) if is_dry => print(&format!("would remove {}\n", path.display())),
        Found::Ours(_) => {
            fs::remove_file(&path).map_err(at(&path))?;
            print(&format!("removed {}\n", path.display()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_one_word_whatever_is_in_it() {
        assert_eq!(quoted(Path::new("/a b/$(c)'d")).expect("a word"), r"'/a b/$(c)'\''d'");
        assert!(quoted(Path::new("/a\nb")).is_err());
    }

    #[test]
    fn the_socket_is_named_where_it_is_another() {
        assert!(!text(Path::new(SOCKET_PATH)).expect("a script").contains("--socket"));
        assert!(text(Path::new("/x/s")).expect("a script").contains("hook run --socket '/x/s' -- \"$@\""));
    }
}
