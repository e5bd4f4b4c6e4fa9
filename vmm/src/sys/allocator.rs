//! The C library's allocator (mallopt(3)): one arena for all threads.

/// Makes all threads allocate from one arena from now on. Per-thread arenas open files at unpredictable moments:
/// `/proc/sys/vm/overcommit_memory` when one shrinks, `/sys/devices/system/cpu/online` when there are many. A
/// thread that may open no file would die by that.
pub fn use_one_arena() {
    // SAFETY: it takes two numbers, and changes what later allocations do.
    let is_set = unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    debug_assert_eq!(is_set, 1, "the C library knows this setting since 2.10");
}
