//! Capabilities (capabilities(7)): a guest's life takes none.
//!
//! What takes one is done before: frames for `--policy reservation` (`fsopen(2)`, `CAP_SYS_ADMIN`), the hugetlb pool (root's files),
//! KVM (the permission of its device). `MADV_COLLAPSE`, `PAGEMAP_SCAN`, dirty logs and userfaultfds that are open take none; looking at frame
//! numbers (`CAP_SYS_ADMIN`) is for guests of others. What is left is a userfaultfd that is opened while the guest runs,
//! and that only where neither its device can be kept open nor `vm.unprivileged_userfaultfd` is 1.

use caps::CapSet;
pub use caps::Capability;

use super::{SandboxConfig, SandboxError};

const FOR_USERFAULTFD: &str =
    "userfaultfd(2) is opened while the guest runs, and there is no /dev/userfaultfd that could stay open";

/// Which stay, and why.
pub(super) fn kept(config: &SandboxConfig) -> Vec<(Capability, &'static str)> {
    let ptrace = (Capability::CAP_SYS_PTRACE, FOR_USERFAULTFD);
    let is_ours = caps::has_cap(None, CapSet::Permitted, ptrace.0).unwrap_or(false);
    (config.keeps_ptrace && is_ours).then_some(ptrace).into_iter().collect()
}

/// Drops all others from every set of the calling thread: ambient, bounding, inheritable, effective, permitted. What is left, in words.
pub(super) fn drop_all_but(kept: &[(Capability, &'static str)]) -> Result<String, SandboxError> {
    let kept: caps::CapsHashSet = kept.iter().map(|(capability, _)| *capability).collect();
    caps::clear(None, CapSet::Ambient)?;
    // Only who has it may take from the bounding set; without new privileges nothing comes of that set any more.
    if caps::has_cap(None, CapSet::Effective, Capability::CAP_SETPCAP)? {
        caps::clear(None, CapSet::Bounding)?;
    }
    caps::clear(None, CapSet::Inheritable)?;
    caps::set(None, CapSet::Effective, &kept)?;
    caps::set(None, CapSet::Permitted, &kept)?;
    nix::sys::prctl::set_no_new_privs().map_err(|errno| super::call("forbid new privileges")(errno.into()))?;
    let names: Vec<String> = kept.iter().map(ToString::to_string).collect();
    Ok(if names.is_empty() { "no capabilities".into() } else { format!("no capabilities but {}", names.join(", ")) })
}
