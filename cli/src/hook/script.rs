//! The script that libvirt runs: its text, its installation and its removal.
//!
//! ```text
//!   #!/bin/sh
//!   # wideleaf hook: written by `wideleaf hook install`, taken away by `wideleaf hook uninstall`
//!   [ ! -x PROGRAM ] || PROGRAM hook run -- "$@" >/dev/null || [ "$2:$?" != prepare:4 ]
//! ```
//!
//! The script outlives every version of the program, and the program itself: if the program is missing, crashes or
//! is killed, the guest still starts. Only a deliberate refusal (exit code 4 of `prepare`) is passed on; at
//! `reconnect` libvirtd would kill the guest for it. It is a script and not a link, because libvirt passes its
//! hooks the event as an argument, but not the program to handle it.
//!
//! libvirtd runs the script as root, so a user that can replace the program that it names becomes root. Therefore it
//! is not installed for a program that users other than root can replace. That includes a program in a sticky
//! folder like `/tmp`, which may also be emptied at boot.

use std::fs::{self, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use tempfile::NamedTempFile;
use wideleaf_control::protocol::SOCKET_PATH;
use wideleaf_run::failure::Failure;

use crate::output::print;

/// Beginning of the second line of each wideleaf script, in every version.
const MARK: &str = "# wideleaf hook:";
/// Mode of the script: all users may read it, and libvirtd runs it.
const MODE: u32 = 0o755;
/// Folder that libvirt's package makes.
const LIBVIRT: &str = "etc/libvirt";

/// Path of the script under this root; libvirt runs all of `qemu.d` since version 6.5.
pub fn path(root: &Path) -> PathBuf {
    root.join(LIBVIRT).join("hooks/qemu.d/wideleaf")
}

/// The text that `install` would write now with this socket.
///
/// # Errors
/// [`Failure::Host`] if this program has no path that a script can name.
pub fn text(socket: &Path) -> Result<String, Failure> {
    text_for(&this_program()?, socket)
}

/// Socket for the next script: the requested one, or that of the installed script. `None`: the installed script has an
/// option `--socket` in another form than wideleaf writes.
pub fn socket_for(asked: Option<&Path>, found: &ScriptFile) -> Option<PathBuf> {
    match (asked, found) {
        (Some(asked), _) => Some(asked.to_owned()),
        (None, ScriptFile::Ours(text)) => socket_in(text),
        (None, ScriptFile::Nothing | ScriptFile::Foreign) => Some(SOCKET_PATH.into()),
    }
}

fn socket_in(text: &str) -> Option<PathBuf> {
    match text.split_once(" hook run --socket ") {
        Some((_, rest)) => unquoted(rest),
        None => (!text.contains("--socket")).then(|| SOCKET_PATH.into()),
    }
}

fn this_program() -> Result<PathBuf, Failure> {
    std::env::current_exe().map_err(|error| Failure::Host(format!("cannot find this program: {error}")))
}

/// The script that runs that program.
///
/// # Errors
/// [`Failure::Host`] if a script cannot name the program.
pub fn text_for(program: &Path, socket: &Path) -> Result<String, Failure> {
    let program = quoted(program)?;
    let option =
        if socket == Path::new(SOCKET_PATH) { String::new() } else { format!("--socket {} ", quoted(socket)?) };
    Ok(format!(
        "#!/bin/sh\n\
         {MARK} written by `wideleaf hook install`, taken away by `wideleaf hook uninstall`\n\
         [ ! -x {program} ] || {program} hook run {option}-- \"$@\" >/dev/null || [ \"$2:$?\" != prepare:4 ]\n"
    ))
}

/// Requirements on the owner of the program that libvirtd runs.
#[derive(Clone, Copy, Debug)]
pub struct OwnerRules<'a> {
    /// Required owner of each part of its path.
    pub owner: u32,
    /// Folder below which the path is checked.
    pub top: &'a Path,
}

impl OwnerRules<'static> {
    /// The requirement for root as the only owner, for all of the path.
    pub fn root_alone() -> OwnerRules<'static> {
        OwnerRules { owner: 0, top: Path::new("/") }
    }
}

impl OwnerRules<'_> {
    /// Checks that no other user can replace that program.
    ///
    /// # Errors
    /// [`Failure::Host`] with the part of its path, and its owner.
    pub fn check(&self, program: &Path) -> Result<(), Failure> {
        let path = fs::canonicalize(program).map_err(at(program))?;
        for part in path.ancestors().take_while(|part| part.starts_with(self.top)) {
            let (uid, gid, mode) =
                fs::symlink_metadata(part).map(|part| (part.uid(), part.gid(), part.mode())).map_err(at(part))?;
            let writer = match () {
                () if uid != self.owner => format!("user {uid}, its owner"),
                () if mode & 0o002 != 0 => "all users".to_owned(),
                () if mode & 0o020 != 0 => format!("group {gid}"),
                () => continue,
            };
            return Err(Failure::Host(format!(
                "cannot install the hook: libvirtd would run {} as root, and {} can be written by {writer}; install \
                wideleaf where only root can write, as in /usr/bin",
                path.display(),
                part.display()
            )));
        }
        Ok(())
    }
}

/// The path as one word for a shell.
fn quoted(path: &Path) -> Result<String, Failure> {
    let text = path.to_str().filter(|text| !text.contains('\n'));
    let text = text.ok_or_else(|| Failure::Host(format!("cannot name {path:?} in a script")))?;
    Ok(format!("'{}'", text.replace('\'', r"'\''")))
}

/// The path at the beginning of that text, as [`quoted`] writes it.
fn unquoted(text: &str) -> Option<PathBuf> {
    let (mut path, mut rest) = (String::new(), text.strip_prefix('\'')?);
    loop {
        let (part, after) = rest.split_once('\'')?;
        path.push_str(part);
        match after.strip_prefix(r"\''") {
            Some(more) => rest = more,
            None => return after.starts_with(' ').then(|| path.into()),
        }
        path.push('\'');
    }
}

/// State of the script's place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScriptFile {
    /// No file at the place.
    Nothing,
    /// A wideleaf script, of this version or another.
    Ours(String),
    /// A foreign file, written by another program or a person.
    Foreign,
}

/// Reads the script's place.
///
/// # Errors
/// [`Failure::Host`] if it cannot be read.
pub fn find(root: &Path) -> Result<ScriptFile, Failure> {
    let path = path(root);
    match fs::read(&path).map(String::from_utf8) {
        Ok(Ok(text)) if text.lines().nth(1).is_some_and(|line| line.starts_with(MARK)) => Ok(ScriptFile::Ours(text)),
        Ok(_) => Ok(ScriptFile::Foreign),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(ScriptFile::Nothing),
        Err(error) => Err(at(&path)(error)),
    }
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> Failure {
    let path = path.display().to_string();
    move |error| Failure::Host(format!("cannot use {path}: {error}"))
}

fn foreign(root: &Path) -> Failure {
    Failure::Host(format!(
        "cannot use {}: it is a foreign file; move it away, because libvirt runs every file in that folder",
        path(root).display()
    ))
}

fn unreadable(path: &Path) -> Failure {
    Failure::Host(format!(
        "cannot renew {}: its option --socket has another form than wideleaf writes; give the daemon's socket by \
        --socket PATH",
        path.display()
    ))
}

/// Writes the script. Without a socket, a script that is renewed keeps its own.
///
/// # Errors
/// [`Failure::Host`] if libvirt is absent, if a foreign file is in the place, if the script's socket cannot be read, or
/// if a user other than root could replace this program.
pub fn install(root: &Path, asked: Option<&Path>, is_dry: bool) -> Result<(), Failure> {
    let (program, path) = (this_program()?, path(root));
    let libvirt = root.join(LIBVIRT);
    if !libvirt.is_dir() {
        return Err(Failure::Host(format!("cannot find {}: is libvirt installed?", libvirt.display())));
    }
    let found = find(root)?;
    if found != ScriptFile::Foreign {
        OwnerRules::root_alone().check(&program)?;
    }
    let is_executable = fs::metadata(&path).is_ok_and(|file| file.permissions().mode() & 0o111 != 0);
    let socket = socket_for(asked, &found).ok_or_else(|| unreadable(&path))?;
    let text = text_for(&program, &socket)?;
    let of_daemon = match asked {
        None if socket != Path::new(SOCKET_PATH) => {
            format!("; it keeps its daemon's socket {} (another one: --socket PATH)", socket.display())
        }
        _ => String::new(),
    };
    match found {
        ScriptFile::Foreign => return Err(foreign(root)),
        ScriptFile::Ours(old) if old == text && is_executable => {
            return print(&format!("{} is already installed{of_daemon}\n", path.display()));
        }
        ScriptFile::Ours(_) | ScriptFile::Nothing => {}
    }
    if is_dry {
        return print(&format!("would write {}{of_daemon}:\n{text}", path.display()));
    }
    // A script that was executable, and so visible to a running libvirtd, keeps its time: `status` compares that
    // with libvirtd's start.
    let since = fs::metadata(&path).and_then(|file| file.modified()).ok().filter(|_| is_executable);
    write(&path, &text, since).map_err(at(&path))?;
    print(&format!("wrote {}{of_daemon}; `wideleaf hook status` says whether libvirtd runs it\n", path.display()))
}

/// Puts the whole script in its place at once, with the time `since`. It is made in the folder above, because
/// libvirt runs every executable file in `qemu.d`.
fn write(path: &Path, text: &str, since: Option<SystemTime>) -> io::Result<()> {
    let folder = path.parent().unwrap_or(path);
    fs::create_dir_all(folder)?;
    let mut file = NamedTempFile::new_in(folder.parent().unwrap_or(folder))?;
    file.write_all(text.as_bytes())?;
    file.as_file().set_permissions(Permissions::from_mode(MODE))?;
    since.map_or(Ok(()), |since| file.as_file().set_modified(since))?;
    file.persist(path).map(drop).map_err(|error| error.error)
}

/// Removes the script. Folders stay: libvirt's package may have made them.
///
/// # Errors
/// [`Failure::Host`] if the file is foreign.
pub fn uninstall(root: &Path, is_dry: bool) -> Result<(), Failure> {
    let path = path(root);
    match find(root)? {
        ScriptFile::Nothing => print(&format!("nothing to remove: there is no {}\n", path.display())),
        ScriptFile::Foreign => Err(foreign(root)),
        ScriptFile::Ours(_) if is_dry => print(&format!("would remove {}\n", path.display())),
        ScriptFile::Ours(_) => {
            fs::remove_file(&path).map_err(at(&path))?;
            print(&format!("removed {}\n", path.display()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_one_word_with_any_characters() {
        assert_eq!(quoted(Path::new("/a b/$(c)'d")).expect("a word"), r"'/a b/$(c)'\''d'");
        assert!(quoted(Path::new("/a\nb")).is_err());
    }

    #[test]
    fn a_program_that_other_users_can_replace_is_refused_with_the_part_of_its_path_and_its_owner() {
        let top = tempfile::tempdir().expect("a temporary folder");
        let top = top.path().canonicalize().expect("it is there");
        let (folder, program) = (top.join("bin"), top.join("bin/wideleaf"));
        fs::create_dir(&folder).expect("it is new");
        fs::write(&program, "").expect("written");
        let chmod = |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode)).expect("its owner's");
        for path in [&top, &folder, &program] {
            chmod(path, 0o755);
        }
        let owner = nix::unistd::geteuid().as_raw();
        let check = |owner| OwnerRules { owner, top: &top }.check(&program).map_err(|failure| failure.to_string());
        assert_eq!(check(owner), Ok(()));
        let error = check(owner + 1).expect_err("another's");
        let expected = format!("{} can be written by user {owner}, its owner", program.display());
        assert!(error.contains(&expected) && error.lines().count() == 1, "{error}");
        for (path, mode, writer) in
            [(&program, 0o775, "group "), (&folder, 0o1777, "all users"), (&top, 0o757, "all users")]
        {
            chmod(path, mode);
            let error = check(owner).expect_err("other users can write there");
            assert!(error.contains(&format!("{} can be written by {writer}", path.display())), "{error}");
            chmod(path, 0o755);
        }
        std::os::unix::fs::symlink(&program, top.join("link")).expect("it is new");
        chmod(&folder, 0o777);
        assert!(OwnerRules { owner, top: &top }.check(&top.join("link")).is_err(), "what a link names counts");
    }

    #[test]
    fn the_script_names_a_socket_that_is_not_the_default() {
        assert!(!text(Path::new(SOCKET_PATH)).expect("a script").contains("--socket"));
        assert!(text(Path::new("/x/s")).expect("a script").contains("hook run --socket '/x/s' -- \"$@\""));
    }

    #[test]
    fn the_socket_of_a_script_is_read_back_and_a_requested_one_counts_more() {
        for socket in [SOCKET_PATH, "/x/s", "/a b/$(c)'d", "/'", "/it''s"] {
            let found = ScriptFile::Ours(text(Path::new(socket)).expect("a script"));
            assert_eq!(socket_for(None, &found), Some(socket.into()));
            assert_eq!(socket_for(Some(Path::new("/y")), &found), Some("/y".into()));
        }
        for found in [ScriptFile::Nothing, ScriptFile::Foreign] {
            assert_eq!(socket_for(None, &found), Some(SOCKET_PATH.into()));
        }
    }

    #[test]
    fn a_socket_in_another_form_than_wideleaf_writes_is_not_guessed() {
        for option in ["--socket=/x/s", "--socket /x/s", "--socket '/x/s", "--socket '/x/'s"] {
            let text = format!("#!/bin/sh\n{MARK}\n'/usr/bin/wideleaf' hook run {option} -- \"$@\"\n");
            assert_eq!(socket_for(None, &ScriptFile::Ours(text.clone())), None, "{option}");
            assert_eq!(socket_for(Some(Path::new("/y")), &ScriptFile::Ours(text)), Some("/y".into()), "{option}");
        }
    }
}
