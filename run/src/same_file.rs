//! Whether two paths are those of one file: a result must not replace another one, or the file that was read.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

/// Whether both paths are those of one file, which need not exist yet. Their spelling may differ.
pub fn is_same_file(a: &Path, b: &Path) -> bool {
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
