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
//!
//! libvirtd runs it as root, and so whoever could put another program in the place of the one it names would be root: it is not installed
//! for a program that anybody but root can replace. That counts a sticky folder like `/tmp` as well, which a boot may empty.

use std::fs::{self, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

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
    text_for(&this_program()?, socket)
}

fn this_program() -> Result<PathBuf, Failure> {
    std::env::current_exe().map_err(|error| Failure::Host(format!("where is this program? {error}")))
}

/// The script that runs that program.
///
/// # Errors
/// [`Failure::Host`] where a script can not name it.
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

/// Who may replace what libvirtd runs.
#[derive(Clone, Copy, Debug)]
pub struct Trust<'a> {
    /// Whose each part of its path has to be.
    pub owner: u32,
    /// From where on: what lies above is taken as it is.
    pub top: &'a Path,
}

impl Trust<'static> {
    /// Root alone, for all of the path.
    pub fn root_alone() -> Trust<'static> {
        Trust { owner: 0, top: Path::new("/") }
    }
}

impl Trust<'_> {
    /// Whether nobody else can put another program in the place of that one.
    ///
    /// # Errors
    /// [`Failure::Host`]: which part of its path, and whose it is.
    pub fn check(&self, program: &Path) -> Result<(), Failure> {
        let path = fs::canonicalize(program).map_err(at(program))?;
        for part in path.ancestors().take_while(|part| part.starts_with(self.top)) {
            let (uid, gid, mode) =
                fs::symlink_metadata(part).map(|part| (part.uid(), part.gid(), part.mode())).map_err(at(part))?;
            let who = match () {
                () if uid != self.owner => format!("user {uid}, whose it is"),
                () if mode & 0o002 != 0 => "everybody".to_owned(),
                () if mode & 0o020 != 0 => format!("group {gid}"),
                () => continue,
            };
            return Err(Failure::Host(format!(
                "libvirtd would run {} as root, and {} can be written by {who}: install wideleaf where root alone can write, as in /usr/bin",
                path.display(),
                part.display()
            )));
        }
        Ok(())
    }
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
/// [`Failure::Host`] where libvirt is absent, where the place is taken, or where somebody else than root could replace this program.
pub fn install(root: &Path, socket: &Path, is_dry: bool) -> Result<(), Failure> {
    let program = this_program()?;
    let (path, text) = (path(root), text_for(&program, socket)?);
    let libvirt = root.join(LIBVIRT);
    if !libvirt.is_dir() {
        return Err(Failure::Host(format!("there is no {}: is libvirt installed?", libvirt.display())));
    }
    let found = find(root)?;
    if found != Found::Foreign {
        Trust::root_alone().check(&program)?;
    }
    let is_executable = fs::metadata(&path).is_ok_and(|file| file.permissions().mode() & 0o111 != 0);
    match found {
        Found::Foreign => return Err(foreign(root)),
        Found::Ours(old) if old == text && is_executable => {
            return print(&format!("{} is there already\n", path.display()));
        }
        Found::Ours(_) | Found::Nothing => {}
    }
    if is_dry {
        return print(&format!("would write {}:\n{text}", path.display()));
    }
    // What was executable, and so seen by a libvirtd that runs, stays as old as it is: `status` compares that with
    // libvirtd's start.
    let since = fs::metadata(&path).and_then(|file| file.modified()).ok().filter(|_| is_executable);
    write(&path, &text, since).map_err(at(&path))?;
    print(&format!("wrote {}; `wideleaf hook status` says whether libvirtd runs it\n", path.display()))
}

/// Puts the whole script in its place at once, as old as `since` says. It is made in the folder above: libvirt runs
/// whatever is executable in `qemu.d`.
fn write(path: &Path, text: &str, since: Option<SystemTime>) -> io::Result<()> {
    let folder = path.parent().unwrap_or(path);
    fs::create_dir_all(folder)?;
    let mut file = NamedTempFile::new_in(folder.parent().unwrap_or(folder))?;
    file.write_all(text.as_bytes())?;
    file.as_file().set_permissions(Permissions::from_mode(MODE))?;
    since.map_or(Ok(()), |since| file.as_file().set_modified(since))?;
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
    fn a_program_that_others_can_replace_is_refused_with_the_part_of_its_path_and_whose_it_is() {
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
        let check = |owner| Trust { owner, top: &top }.check(&program).map_err(|failure| failure.to_string());
        assert_eq!(check(owner), Ok(()));
        let error = check(owner + 1).expect_err("another's");
        let whose = format!("{} can be written by user {owner}, whose it is", program.display());
        assert!(error.contains(&whose) && error.lines().count() == 1, "{error}");
        for (path, mode, who) in
            [(&program, 0o775, "group "), (&folder, 0o1777, "everybody"), (&top, 0o757, "everybody")]
        {
            chmod(path, mode);
            let error = check(owner).expect_err("others can write there");
            assert!(error.contains(&format!("{} can be written by {who}", path.display())), "{error}");
            chmod(path, 0o755);
        }
        std::os::unix::fs::symlink(&program, top.join("link")).expect("it is new");
        chmod(&folder, 0o777);
        assert!(Trust { owner, top: &top }.check(&top.join("link")).is_err(), "what a link names counts");
    }

    #[test]
    fn the_socket_is_named_where_it_is_another() {
        assert!(!text(Path::new(SOCKET_PATH)).expect("a script").contains("--socket"));
        assert!(text(Path::new("/x/s")).expect("a script").contains("hook run --socket '/x/s' -- \"$@\""));
    }
}
