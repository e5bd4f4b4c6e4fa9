//! Mounts of hugetlbfs, through which QEMU and libvirt use the pool. libvirt reads them once, when it starts.

use std::path::PathBuf;

use wideleaf_policies::Bytes;

use super::{HugetlbPools, PoolError};

/// One mount of hugetlbfs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HugetlbMount {
    /// Path of the mount.
    pub path: PathBuf,
    /// Size of its pages; `None` if the options do not say, which means the default size.
    pub page: Option<Bytes>,
}

impl HugetlbPools {
    /// The mounts of hugetlbfs that this process sees (proc_mounts(5)).
    ///
    /// # Errors
    /// [`PoolError::File`] if the mounts cannot be read.
    pub fn mounts(&self) -> Result<Vec<HugetlbMount>, PoolError> {
        Ok(self.text(&self.root.join("proc/mounts"))?.lines().filter_map(mount).collect())
    }
}

fn mount(line: &str) -> Option<HugetlbMount> {
    let mut words = line.split(' ');
    let (path, kind, options) = (words.nth(1)?, words.next()?, words.next()?);
    let page = options.split(',').find_map(|option| Bytes::parse(option.strip_prefix("pagesize=")?).ok());
    (kind == "hugetlbfs").then(|| HugetlbMount { path: unescaped(path).into(), page })
}

/// Replaces `\040` and the like in a path by blank, tab, newline and backslash.
fn unescaped(path: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .into_iter()
        .fold(path.to_owned(), |path, (escape, character)| path.replace(escape, character))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::fake_kernel::Tree;
    use wideleaf_policies::units::{gib, mib};

    #[test]
    fn only_hugetlbfs_mounts_are_listed_with_their_page_size() {
        let tree = Tree::new();
        tree.put(
            "proc/mounts",
            "none /dev/hugepages hugetlbfs rw,relatime,pagesize=2M 0 0\n\
             none /mnt/of\\040a\\040gib hugetlbfs rw,relatime,pagesize=1024M 0 0\n\
             none /old hugetlbfs rw 0 0\ntmpfs /dev/shm tmpfs rw,pagesize=2M 0 0\nnonsense\n\n",
        );
        let mounts = tree.pools().mounts().expect("the file is there");
        let expected = [("/dev/hugepages", Some(mib(2))), ("/mnt/of a gib", Some(gib(1))), ("/old", None)];
        assert_eq!(mounts, expected.map(|(path, page)| HugetlbMount { path: path.into(), page }));
    }
}
