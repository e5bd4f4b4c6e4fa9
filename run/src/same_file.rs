//! Whether two paths are those of one file: a result must not replace another one, or the file that was read.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use crate::failure::Failure;

/// Checks that each place that is written is another file than those that are read, and than the other places: a result
/// replaces what is there. Each has the name of its option.
///
/// # Errors
/// The two names and the path.
pub fn refuse_one_file_for_two<'a>(
    read: impl IntoIterator<Item = (&'a str, &'a Path)>,
    written: impl IntoIterator<Item = (&'a str, Option<&'a Path>)>,
) -> Result<(), Failure> {
    let mut taken: Vec<_> = read.into_iter().collect();
    for (option, path) in written.into_iter().filter_map(|(option, path)| Some((option, path?))) {
        if let Some((other, _)) = taken.iter().find(|(_, other)| is_same_file(other, path)) {
            return Err(Failure::Usage(format!(
                "cannot use one file twice: {other} and {option} are both {}; name two files",
                path.display()
            )));
        }
        taken.push((option, path));
    }
    Ok(())
}

/// Whether both paths are those of one file, which need not exist yet. Their spelling may differ.
fn is_same_file(a: &Path, b: &Path) -> bool {
    let name = |path: &Path| {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        Some((fs::canonicalize(folder).ok()?, path.file_name()?.to_owned()))
    };
    let file = |path: &Path| fs::metadata(path).ok().map(|is| (is.dev(), is.ino()));
    let is_same_name = name(a).is_some_and(|of_a| Some(of_a) == name(b));
    a == b || is_same_name || file(a).is_some_and(|of_a| Some(of_a) == file(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_file_has_several_spellings() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = |name: &str| folder.path().join(name);
        fs::create_dir(path("sub")).expect("a folder");
        assert!(is_same_file(&path("new"), &path("sub/../new")), "it does not exist yet");
        assert!(!is_same_file(&path("new"), &path("sub/new")));
        fs::write(path("there"), "").expect("writable");
        std::os::unix::fs::symlink("../there", path("sub/link")).expect("a link");
        assert!(is_same_file(&path("sub/link"), &path("there")), "through a link");
        assert!(!is_same_file(&path("new"), &path("there")));
        assert!(is_same_file(Path::new("no/folder"), Path::new("no/folder")));
    }
}
