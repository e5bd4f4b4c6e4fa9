//! Counters of a disk: completed and refused requests.

use crate::devices::virtio::counters::counters;

counters! {
    /// Counters of a disk, updated while it works.
    counters DiskCounters,
    /// Values of a disk's counters at one moment.
    values DiskStatistics:
    /// Number of wake-ups; requests that arrive while another is served need none.
    wake_ups,
    /// Number of completed reads.
    reads,
    /// Number of bytes read.
    read_bytes,
    /// Number of completed writes.
    writes,
    /// Number of bytes written.
    written_bytes,
    /// Number of completed FLUSHes.
    flushes,
    /// Number of requests for the disk's name.
    ids,
    /// Number of completed DISCARDs.
    discards,
    /// Number of bytes that they gave back.
    discarded_bytes,
    /// Number of completed WRITE_ZEROES.
    zeroings,
    /// Number of bytes that they made zero.
    zeroed_bytes,
    /// Number of chains without a whole header, a status byte, an end, or whole sectors.
    refused_malformed,
    /// Number of requests beyond the disk's end.
    refused_beyond_end,
    /// Number of writes to a read-only disk.
    refused_read_only,
    /// Number of requests of a kind, or with a flag, that the disk does not know.
    refused_unsupported,
    /// Number of requests with buffers outside RAM.
    failed_no_ram,
    /// Number of reads beyond the file's present end: it was shortened under the guest.
    failed_short,
    /// Number of requests that the host's kernel refused.
    failed_host,
}
