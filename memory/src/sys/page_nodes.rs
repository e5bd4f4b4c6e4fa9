//! `move_pages(2)`: the NUMA nodes of single pages, and their moves to another node.

use std::io;

use wideleaf_policies::{Hva, NodeId};

/// Moves only pages that no other process maps (linux/mempolicy.h).
const MPOL_MF_MOVE: libc::c_int = 1 << 1;

/// Maximum number of pages of one call, so that a call takes a millisecond at most.
pub(crate) const PAGES_MAX: usize = 4096;

/// Appends the node of each page to `nodes`; `None` for a page that is not present. `pid` 0 is this process; another
/// one needs a ptrace access of mode `PTRACE_MODE_READ_REALCREDS` (move_pages(2)).
pub(crate) fn nodes_of(pid: u32, pages: &[Hva], nodes: &mut Vec<Option<NodeId>>) -> io::Result<()> {
    for pages in pages.chunks(PAGES_MAX) {
        let addresses: Vec<u64> = pages.iter().map(|page| page.get()).collect();
        let mut status: Vec<libc::c_int> = vec![-libc::ENOENT; pages.len()];
        // SAFETY: the kernel reads `addresses.len()` addresses, which it does not follow in this process, and writes as
        // many numbers; both arrays have that length and live until the call returns. Without target nodes it
        // changes no memory.
        let asked = unsafe {
            libc::syscall(
                libc::SYS_move_pages,
                pid,
                addresses.len(),
                addresses.as_ptr(),
                std::ptr::null::<libc::c_int>(),
                status.as_mut_ptr(),
                0_i32,
            )
        };
        if asked < 0 {
            return Err(io::Error::last_os_error());
        }
        nodes.extend(status.into_iter().map(|node| u16::try_from(node).ok().map(NodeId)));
    }
    Ok(())
}

/// The node of the page at an address of this process; `None` for one that is not present. Brings no page, so that it
/// waits for no userfaultfd.
pub(crate) fn node_of(page: Hva) -> io::Result<Option<NodeId>> {
    let mut nodes = Vec::with_capacity(1);
    nodes_of(0, &[page], &mut nodes)?;
    Ok(nodes.pop().flatten())
}

/// Moves pages that no other process maps to a node. Their contents stay the same; a page of a huge page moves all of
/// it. Returns the error of the first page that was not moved.
pub(crate) fn move_to(pid: u32, pages: &[Hva], node: NodeId) -> io::Result<()> {
    let target = vec![libc::c_int::from(node.0); pages.len().min(PAGES_MAX)];
    for pages in pages.chunks(PAGES_MAX) {
        let addresses: Vec<u64> = pages.iter().map(|page| page.get()).collect();
        let mut status: Vec<libc::c_int> = vec![0; pages.len()];
        // SAFETY: as for `nodes_of`; the kernel also reads `addresses.len()` numbers of `target`, which has at least as
        // many. A page that moves keeps its address and contents.
        let moved = unsafe {
            libc::syscall(
                libc::SYS_move_pages,
                pid,
                addresses.len(),
                addresses.as_ptr(),
                target.as_ptr(),
                status.as_mut_ptr(),
                MPOL_MF_MOVE,
            )
        };
        if moved < 0 {
            return Err(io::Error::last_os_error());
        }
        // An absent page has no node to leave. A positive result counts pages that were not moved (Linux 4.17).
        let failed =
            status.iter().find(|status| **status < 0 && **status != -libc::ENOENT && **status != -libc::EFAULT);
        match failed {
            Some(errno) => return Err(io::Error::from_raw_os_error(-errno)),
            None if moved > 0 => return Err(io::Error::from_raw_os_error(libc::EBUSY)),
            None => {}
        }
    }
    Ok(())
}
