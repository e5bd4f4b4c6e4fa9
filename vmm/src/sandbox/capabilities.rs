//! Capabilities (capabilities(7)): a running guest needs none.
//!
//! All work that needs one is done earlier: frames for `--policy reservation` (`fsopen(2)`, `CAP_SYS_ADMIN`), the
//! hugetlb pool (root's files), KVM (the permission of its device). `MADV_COLLAPSE`, `PAGEMAP_SCAN`, dirty logs and
//! open userfaultfds need none; reading frame numbers (`CAP_SYS_ADMIN`) is only for external guests. The exception
//! is a userfaultfd that is opened while the guest runs, and only where its device cannot be kept open and
//! `vm.unprivileged_userfaultfd` is not 1.

use caps::CapSet;
pub use caps::Capability;

use super::{SandboxConfig, SandboxError};

const FOR_USERFAULTFD: &str =
    "userfaultfd(2) is opened while the guest runs, and there is no /dev/userfaultfd that could stay open";

/// The capabilities that remain, each with its reason.
pub(super) fn kept(config: &SandboxConfig) -> Vec<(Capability, &'static str)> {
    let ptrace = (Capability::CAP_SYS_PTRACE, FOR_USERFAULTFD);
    let is_ours = caps::has_cap(None, CapSet::Permitted, ptrace.0).unwrap_or(false);
    (config.keeps_ptrace && is_ours).then_some(ptrace).into_iter().collect()
}

/// Drops all others from every set of the calling thread: ambient, bounding, inheritable, effective, permitted.
/// Returns the remaining ones as text.
pub(super) fn drop_all_but(kept: &[(Capability, &'static str)]) -> Result<String, SandboxError> {
    let kept: caps::CapsHashSet = kept.iter().map(|(capability, _)| *capability).collect();
    caps::clear(None, CapSet::Ambient)?;
    // Only a thread with this capability may shrink the bounding set; without new privileges that set has no
    // effect any more.
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
