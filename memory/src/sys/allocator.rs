//! The C library's allocator (mallopt(3)): one arena for all threads.

use std::ffi::{CStr, c_char};
use std::ptr::null_mut;

/// Makes all threads allocate from one arena from now on. Per-thread arenas open files at unpredictable moments:
/// `/proc/sys/vm/overcommit_memory` when one shrinks, `/sys/devices/system/cpu/online` when there are many. A
/// thread that may open no file would die by that.
///
/// An arena that an earlier thread had remains, even after that thread's end: a later thread takes it over.
pub fn use_one_arena() {
    // SAFETY: it takes two numbers, and changes what later allocations do.
    let is_set = unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    debug_assert_eq!(is_set, 1, "the C library knows this setting since 2.10");
}

/// Number of arenas of this process, with those that no thread uses now (malloc_info(3)); `None` if the C library
/// does not tell it.
pub fn arenas() -> Option<usize> {
    let (mut text, mut bytes) = (null_mut::<c_char>(), 0);
    // SAFETY: both places live until the stream is closed.
    let stream = unsafe { libc::open_memstream(&raw mut text, &raw mut bytes) };
    if stream.is_null() {
        return None;
    }
    // SAFETY: the stream is open.
    let told = unsafe { libc::malloc_info(0, stream) };
    // SAFETY: nothing uses the stream after this, which completes the text.
    let closed = unsafe { libc::fclose(stream) };
    if text.is_null() {
        return None;
    }
    // SAFETY: the closed stream left a text that ends with a zero byte (open_memstream(3)).
    let arenas = unsafe { CStr::from_ptr(text) }.to_str().ok().map(|text| text.matches("<heap nr=").count());
    // SAFETY: the text is the caller's to free, and nothing refers to it any more.
    unsafe { libc::free(text.cast()) };
    arenas.filter(|_| [told, closed] == [0, 0])
}
