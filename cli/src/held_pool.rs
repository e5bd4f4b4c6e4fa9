//! Room in the hugetlb pool that is given back however this process ends (`held.rs`).

use wideleaf_memory::pool::HugetlbPools;
use wideleaf_policies::PageSize;

use crate::args::HoldPoolArgs;
use crate::failure::Failure;
use crate::held::{self, Held};

/// Room for pages of 2 MiB, until this is dropped or the process ends.
#[derive(Debug)]
pub struct HeldPool(#[expect(dead_code, reason = "given back when dropped")] Held);

impl HeldPool {
    /// Makes room for so many pages more.
    ///
    /// # Errors
    /// The reason why it cannot be had.
    pub fn lease(pages: u64) -> Result<HeldPool, String> {
        Held::start(&["hold-pool", "--pages", &pages.to_string()]).map(HeldPool)
    }
}

/// The child: runs until its standard input ends.
///
/// # Errors
/// [`Failure::Host`] where the lease cannot be had.
pub fn main(args: &HoldPoolArgs) -> Result<(), Failure> {
    let pools = HugetlbPools::at(&args.root);
    let _lease = pools.lease(PageSize::Huge2M, args.pages).map_err(|error| Failure::Host(error.to_string()))?;
    held::until_nobody_wants_it("")
}
