//! Pages of the hugetlb pool that are given back however this process ends, even by SIGKILL: a child holds them
//! (`guardian.rs`).

use std::path::PathBuf;

use clap::Args;
use wideleaf_memory::backing::{BackingConfig, BackingKind};
use wideleaf_memory::pool::HugetlbPools;
use wideleaf_memory::region::GuestRam;
use wideleaf_policies::{Gpa, GpaRange, PageSize};
use wideleaf_run::failure::Failure;

use super::{Held, until_input_ends};

/// Arguments of the child that holds pages of the pool.
#[derive(Debug, Args)]
pub struct HoldPoolArgs {
    /// Number of pages
    #[arg(long, value_name = "N")]
    pub pages: u64,

    /// Size of a page
    #[arg(long, value_name = "2m|1g", value_parser = PageSize::parse, default_value = "2m")]
    pub size: PageSize,

    /// The folder that holds `sys/`
    #[arg(long, value_name = "FOLDER", default_value = "/")]
    pub root: PathBuf,
}

/// Pages of the pool, held until this is dropped or the process ends.
#[derive(Debug)]
pub struct HeldPool(#[expect(dead_code, reason = "given back when dropped")] Held);

impl HeldPool {
    /// As [`HeldPool::lease_of`], with pages of 2 MiB.
    ///
    /// # Errors
    /// The reason why they are not available.
    pub fn lease(pages: u64) -> Result<HeldPool, String> {
        HeldPool::lease_of(PageSize::Huge2M, pages)
    }

    /// Adds this number of pages to the pool. They are made when they are mapped, so this maps them once: a host with
    /// its memory in pieces has none.
    ///
    /// # Errors
    /// The reason why they are not available.
    pub fn lease_of(size: PageSize, pages: u64) -> Result<HeldPool, String> {
        let held = Held::start(&["hold-pool", "--size", size.name(), "--pages", &pages.to_string()])?;
        let range = GpaRange::new(Gpa::new(0), size.bytes() * pages).ok_or("no pages are asked for")?;
        let backing = BackingConfig::new(BackingKind::Hugetlb, size).map_err(|error| error.to_string())?;
        GuestRam::map(&[range], backing).map_err(|error| error.to_string())?;
        Ok(HeldPool(held))
    }
}

/// The child: runs until its standard input ends.
///
/// # Errors
/// [`Failure::Host`] if the pages are not available.
pub fn main(args: &HoldPoolArgs) -> Result<(), Failure> {
    wideleaf_run::guardian::outlive_signals();
    let pools = HugetlbPools::at(&args.root);
    let _lease = pools.lease(args.size, args.pages).map_err(|error| Failure::Host(error.to_string()))?;
    until_input_ends("")
}
