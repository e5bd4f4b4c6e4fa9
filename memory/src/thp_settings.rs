//! Reads the host's settings for THP from sysfs; changes none.

use std::fs;
use std::path::Path;

/// Folder of the settings for THP (Documentation/admin-guide/mm/transhuge.rst).
pub(crate) const THP: &str = "sys/kernel/mm/transparent_hugepage";

/// Setting under which no fault makes a huge page, in marked memory neither.
pub(crate) const NEVER: &str = "never";

/// The setting for pages of 2 MiB at a fault: their own (Linux 6.8), or the one for all sizes.
pub(crate) fn thp_enabled(root: &Path) -> Result<String, String> {
    match chosen_setting(&root.join(THP).join("hugepages-2048kB/enabled")) {
        Ok(own) if own != "inherit" => Ok(own),
        _ => chosen_setting(&root.join(THP).join("enabled")),
    }
}

/// Whether no fault makes a huge page of 2 MiB on this host; `MADV_COLLAPSE` does all the same.
pub(crate) fn is_thp_never(root: &Path) -> bool {
    thp_enabled(root).is_ok_and(|setting| setting == NEVER)
}

/// The word in brackets: `always [madvise] never`.
pub(crate) fn chosen_setting(file: &Path) -> Result<String, String> {
    let text = fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
    let chosen = text.split_whitespace().find_map(|word| word.strip_prefix('[')?.strip_suffix(']'));
    chosen.map(str::to_owned).ok_or_else(|| format!("{}: no setting is chosen in {text:?}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_make_no_huge_page_under_never_of_their_own_or_of_all_sizes() {
        let tree = tempfile::tempdir().expect("a temporary folder");
        let put = |file: &str, text: &str| {
            let path = tree.path().join(THP).join(file);
            fs::create_dir_all(path.parent().expect("it has one")).expect("a folder");
            fs::write(path, text).expect("a file");
        };
        assert!(!is_thp_never(tree.path()), "a kernel without THP");
        put("enabled", "always madvise [never]\n");
        assert!(is_thp_never(tree.path()), "Linux before 6.8 has one setting");
        put("hugepages-2048kB/enabled", "always [inherit] madvise never\n");
        assert!(is_thp_never(tree.path()));
        put("hugepages-2048kB/enabled", "always inherit [madvise] never\n");
        assert!(!is_thp_never(tree.path()));
        put("enabled", "always [madvise] never\n");
        put("hugepages-2048kB/enabled", "always inherit madvise [never]\n");
        assert!(is_thp_never(tree.path()));
    }
}
