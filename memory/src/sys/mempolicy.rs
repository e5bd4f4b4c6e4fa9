//! `mbind(2)`, `set_mempolicy(2)` and `get_mempolicy(2)`: on which NUMA nodes the kernel allocates pages.

use std::io;

use libc::c_int;
use wideleaf_policies::node::{NODE_WORDS, NODES_MAX};
use wideleaf_policies::{Bytes, Hva, NodeId, NodeSet};

/// `MPOL_PREFERRED_MANY` (Linux 5.15, linux/mempolicy.h): like `MPOL_PREFERRED`, of several nodes.
pub(crate) const PREFERRED_MANY: c_int = 5;

/// Number of bits that the kernel reads of a mask: it takes one less than it is told (`get_nodes`, mm/mempolicy.c).
const MASK_BITS: libc::c_ulong = NODES_MAX as libc::c_ulong + 1;

fn result(returned: libc::c_long) -> io::Result<()> {
    if returned == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Sets the policy of a range for pages that do not exist yet. Those that do stay where they are.
pub(crate) fn mbind(start: Hva, bytes: Bytes, mode: c_int, nodes: &NodeSet) -> io::Result<()> {
    let words = nodes.words();
    // SAFETY: changes neither contents nor mapping of any range, so it is sound for any; one that is not mapped is
    // EFAULT. The kernel reads the mask, which lives until the call returns and has as many bits as it is told.
    result(unsafe { libc::syscall(libc::SYS_mbind, start.get(), bytes.get(), mode, words.as_ptr(), MASK_BITS, 0_u32) })
}

/// Sets the policy of the calling thread for pages of memory that has none of its own, as a file of huge pages.
pub(crate) fn set_of_thread(mode: c_int, nodes: &NodeSet) -> io::Result<()> {
    let words = nodes.words();
    // SAFETY: the kernel reads the mask, which lives until the call returns and has as many bits as it is told.
    result(unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, words.as_ptr(), MASK_BITS) })
}

/// The policy of the calling thread, with its nodes.
pub(crate) fn of_thread() -> io::Result<(c_int, NodeSet)> {
    let (mut mode, mut words): (c_int, [u64; NODE_WORDS]) = (0, [0; NODE_WORDS]);
    // SAFETY: the kernel writes an int and a mask of at most as many bits as it is told; both live until it returns.
    result(unsafe {
        libc::syscall(libc::SYS_get_mempolicy, &raw mut mode, words.as_mut_ptr(), MASK_BITS, 0_u64, 0_u64)
    })?;
    let nodes = (0..NODES_MAX).filter(|node| words[usize::from(*node) / 64] >> (node % 64) & 1 == 1);
    Ok((mode, nodes.map(NodeId).collect()))
}

const _: () = assert!(NODE_WORDS * 64 + 1 == MASK_BITS as usize, "the kernel reads no bit behind the mask");

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::mapping::AddressReservation;
    use crate::sys::page_nodes::node_of;
    use wideleaf_policies::PageSize;

    /// Whether this kernel has nodes (`CONFIG_NUMA`) and permits policies.
    fn has_nodes(error: &io::Error) -> bool {
        let is_absent = matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM));
        if is_absent {
            println!("skipped: {error}");
        }
        !is_absent
    }

    #[test]
    fn a_page_of_a_bound_range_lies_on_its_node() {
        let bytes = PageSize::Huge2M.bytes();
        let area = AddressReservation::new(bytes, PageSize::Huge2M).expect("addresses");
        let start = area.map_at(Bytes::ZERO, bytes, None).expect("memory");
        let bound = mbind(start, bytes, libc::MPOL_BIND, &NodeSet::of(NodeId(0)));
        match bound {
            Err(error) if !has_nodes(&error) => return,
            bound => bound.expect("each machine has a node 0"),
        }
        area.piece(Bytes::ZERO, bytes).words()[0].store(1, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(node_of(start).expect("it is mapped"), Some(NodeId(0)));
        let last = start + (bytes - PageSize::Base4K.bytes());
        area.piece(Bytes::ZERO, bytes).discard().expect("it is mapped");
        assert_eq!(node_of(last).expect("it is mapped"), None, "a look brings no page");
    }

    #[test]
    fn a_node_that_does_not_exist_is_refused() {
        let bytes = PageSize::Base4K.bytes();
        let area = AddressReservation::new(bytes, PageSize::Base4K).expect("addresses");
        let start = area.map_at(Bytes::ZERO, bytes, None).expect("memory");
        let error = mbind(start, bytes, libc::MPOL_BIND, &NodeSet::of(NodeId(1023))).expect_err("no host has it");
        if has_nodes(&error) {
            assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
        }
    }

    #[test]
    fn a_threads_policy_is_read_as_it_was_set() {
        let (before, nodes) = match of_thread() {
            Err(error) if !has_nodes(&error) => return,
            read => read.expect("a thread has a policy"),
        };
        let node = NodeSet::of(NodeId(0));
        set_of_thread(libc::MPOL_PREFERRED, &node).expect("each machine has a node 0");
        assert_eq!(of_thread().expect("a thread has a policy"), (libc::MPOL_PREFERRED, node));
        set_of_thread(before, &nodes).expect("it was permitted before");
        assert_eq!(of_thread().expect("a thread has a policy"), (before, nodes));
    }
}
