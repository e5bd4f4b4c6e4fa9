//! Pages that were added to a pool, as plain data: all that a later process needs in order to give them back. The owner
//! keeps it in a file; the pages end with a boot, and the data name the boot.

use serde::{Deserialize, Serialize};
use wideleaf_policies::PageSize;

/// Pages added to a pool: all that is needed to undo it, also in a process that starts later.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Granted {
    /// Page size of the pool.
    #[serde(with = "by_name")]
    pub(super) size: PageSize,
    /// Number of new pages.
    pub(super) pages: u64,
    /// Growth of `nr_hugepages` by node: the new pages, and surplus ones that became persistent.
    pub(super) added: Vec<NodePages>,
    /// Identifier of the boot (`/proc/sys/kernel/random/boot_id`): the pages do not survive it.
    pub(super) boot: String,
}

/// A number of pages on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodePages {
    /// Number of the node; `None` if the kernel does not count by node.
    pub node: Option<u32>,
    /// Number of pages.
    pub pages: u64,
}

impl Granted {
    pub(super) fn new(size: PageSize, pages: u64, added: Vec<NodePages>, boot: &str) -> Granted {
        Granted { size, pages, added, boot: boot.to_owned() }
    }

    /// Page size of the pool that grew.
    pub fn size(&self) -> PageSize {
        self.size
    }

    /// Number of new unused pages.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Pages still to be given back, by node.
    pub fn added(&self) -> &[NodePages] {
        &self.added
    }

    /// Whether everything is given back.
    pub fn is_undone(&self) -> bool {
        self.added.is_empty()
    }

    pub(super) fn added_mut(&mut self) -> std::slice::IterMut<'_, NodePages> {
        self.added.iter_mut()
    }

    pub(super) fn drop_empty_parts(&mut self) {
        self.added.retain(|part| part.pages > 0);
    }
}

/// Serialises a page size by its name, as everywhere else.
pub(super) mod by_name {
    use serde::{Deserialize, Deserializer, Serializer, de};
    use wideleaf_policies::PageSize;

    pub(in crate::pool) fn serialize<S: Serializer>(size: &PageSize, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(size.name())
    }

    pub(in crate::pool) fn deserialize<'d, D: Deserializer<'d>>(from: D) -> Result<PageSize, D::Error> {
        let name = String::deserialize(from)?;
        PageSize::parse(&name).map_err(de::Error::custom)
    }
}
