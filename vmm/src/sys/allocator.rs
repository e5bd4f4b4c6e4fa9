//! The C library's allocator (mallopt(3)): memory of threads for themselves, or of all together.

/// All threads allocate from one arena from now on. Arenas of threads' own open files at moments of their own: `/proc/sys/vm/overcommit_memory`
/// where one shrinks, `/sys/devices/system/cpu/online` where there are many of them. A thread that may open none would end for it.
pub fn use_one_arena() {
    // SAFETY: it takes two numbers, and changes what later allocations do.
    let is_set = unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    debug_assert_eq!(is_set, 1, "the C library knows this setting since 2.10");
}
