//! What a disk did and refused.

use crate::devices::virtio::counters::counters;

counters! {
    /// What a disk does, counted while it works.
    counters DiskCounters,
    /// What a disk did.
    values DiskStatistics:
    /// Wake-ups: requests that came while one was served need none.
    wake_ups,
    /// Reads that were done.
    reads,
    /// What they read.
    read_bytes,
    /// Writes that were done.
    writes,
    /// What they wrote.
    written_bytes,
    /// FLUSHes that were done.
    flushes,
    /// Questions for the disk's name.
    ids,
    /// DISCARDs that were done.
    discards,
    /// What they gave back.
    discarded_bytes,
    /// WRITE_ZEROES that were done.
    zeroings,
    /// What they made zero.
    zeroed_bytes,
    /// Chains without a whole header, a status byte, an end, or whole sectors.
    refused_malformed,
    /// Requests beyond the disk's end.
    refused_beyond_end,
    /// Writes to a disk that is read-only.
    refused_read_only,
    /// Requests of a kind, or with a flag, that the disk does not know.
    refused_unsupported,
    /// Requests with buffers that are not in RAM.
    failed_no_ram,
    /// Reads of what the file has no longer: it was cut shorter under the guest.
    failed_short,
    /// Requests that the host's kernel refused.
    failed_host,
}
