//! The state of a virtio device in a snapshot: its registers and queues, which are the same for all kinds, and the
//! little that each kind has beside them. No chain is half done when it is taken ([`super::service`]).
//!
//! ```text
//!   take     stop each service between two pieces of work ─▶ positions of its queues, the device's own state
//!   restore  the device's own state ─▶ registers ─▶ queues ─▶ activated as by its driver ─▶ each queue is looked at
//! ```

use std::any::Any;
use std::fmt;

use serde::{Deserialize, Serialize};
use virtio_queue::{Queue, QueueState};

use super::activate_error::ActivateError;
use super::kind::DeviceKind;

/// A device: the registers that a driver sees, and what is behind them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedDevice {
    /// The device's own state, which names its kind.
    pub device: DeviceState,
    /// Status that the driver has written.
    pub status: u32,
    /// Features that the driver has accepted.
    pub features: u64,
    /// Selector of the half of the device's features.
    pub device_features_half: u32,
    /// Selector of the half of the driver's features.
    pub driver_features_half: u32,
    /// Number of the selected queue.
    pub queue_selected: u32,
    /// Reasons of the interrupt that the driver has not acknowledged.
    pub interrupt_status: u32,
    /// Whether the device waits for a reset: its driver broke it, or the host failed it.
    pub needs_reset: bool,
    /// All queues, in order.
    pub queues: Vec<SavedQueue>,
}

/// A queue and the positions up to which its rings are used. Whether notifications and interrupts are wanted is in
/// the rings, and so in guest RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedQueue {
    /// Largest number of entries.
    pub entries_max: u16,
    /// Number of entries that the driver chose.
    pub entries: u16,
    /// Whether the driver has set it up.
    pub is_ready: bool,
    /// Guest-physical address of the descriptor table.
    pub descriptors: u64,
    /// Guest-physical address of the available ring.
    pub available: u64,
    /// Guest-physical address of the used ring.
    pub used: u64,
    /// Number of chains taken, modulo 2^16.
    pub next_available: u16,
    /// Number of chains handed back, modulo 2^16.
    pub next_used: u16,
}

impl SavedQueue {
    /// The state of a queue.
    pub fn of(queue: QueueState) -> SavedQueue {
        SavedQueue {
            entries_max: queue.max_size,
            entries: queue.size,
            is_ready: queue.ready,
            descriptors: queue.desc_table,
            available: queue.avail_ring,
            used: queue.used_ring,
            next_available: queue.next_avail,
            next_used: queue.next_used,
        }
    }

    /// A queue in this state; `None` where no driver can bring one into it.
    pub fn restored(self) -> Option<Queue> {
        let state = QueueState {
            max_size: self.entries_max,
            next_avail: self.next_available,
            next_used: self.next_used,
            // Set when the device is activated, from the accepted features.
            event_idx_enabled: false,
            size: self.entries,
            ready: self.is_ready,
            desc_table: self.descriptors,
            avail_ring: self.available,
            used_ring: self.used,
        };
        Queue::try_from(state).ok()
    }
}

/// The state of a device beside registers and queues, by its kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum DeviceState {
    /// A network card. A frame that waits for buffers is lost, as any network may lose it.
    Net {
        /// Address of the card, as text.
        mac: String,
        /// Largest packet of the link, in bytes.
        mtu: u32,
    },
    /// A disk of the host.
    Block(SavedDisk),
    /// A source of random bytes.
    Entropy,
    /// Memory given back to the host.
    Balloon(SavedBalloon),
    /// Sockets between guest and host. All connections end at a restore.
    Vsock {
        /// Address of the guest.
        cid: u32,
    },
}

impl DeviceState {
    /// Kind of the device.
    pub fn kind(&self) -> DeviceKind {
        match self {
            DeviceState::Net { .. } => DeviceKind::Net,
            DeviceState::Block(_) => DeviceKind::Block,
            DeviceState::Entropy => DeviceKind::Entropy,
            DeviceState::Balloon(_) => DeviceKind::Balloon,
            DeviceState::Vsock { .. } => DeviceKind::Vsock,
        }
    }
}

/// A disk: its identity. All requests that were taken are completed, and all writes are durable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedDisk {
    /// Name that the guest reads.
    pub id: String,
    /// Size of the disk, in bytes.
    pub bytes: u64,
    /// Whether the guest cannot write it.
    pub is_read_only: bool,
    /// The host's file at that moment; `None` for a block device.
    pub file: Option<SavedFile>,
}

/// A file of the host, and its last change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedFile {
    /// Number of the file system's device.
    pub device: u64,
    /// Number of the file in its file system.
    pub inode: u64,
    /// Time of the last change of its content, in seconds since 1970.
    pub modified_s: i64,
    /// Nanoseconds of that time.
    pub modified_ns: i64,
}

/// The state of a balloon.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedBalloon {
    /// Target size, in base pages.
    pub target_pages: u32,
    /// Actual size as the driver wrote it, in base pages.
    pub actual_pages: u32,
    /// Runs of base pages in the balloon: number of the first page and number of pages, ascending.
    pub inflated: Vec<(u64, u64)>,
    /// First descriptor of the statistics' buffer that the device holds until it is asked for new ones.
    pub statistics_held: Option<u16>,
}

/// The state of a device while its service rests. Dropping it lets the service continue.
pub struct Rest {
    /// Numbers of the queues in service, and their state. Other queues are as the driver left them.
    pub queues: Vec<(usize, QueueState)>,
    /// The device's own state; `None` where its flusher returns it.
    pub device: Option<DeviceState>,
    /// What keeps the service at rest.
    held: Option<Box<dyn Any + Send>>,
}

impl Rest {
    /// The state of a device without a service.
    pub fn idle(device: impl Into<Option<DeviceState>>) -> Rest {
        Rest { queues: Vec::new(), device: device.into(), held: None }
    }

    /// The state of a device. Its service rests until `held` is dropped.
    pub fn held(
        device: impl Into<Option<DeviceState>>,
        queues: Vec<(usize, QueueState)>,
        held: Box<dyn Any + Send>,
    ) -> Rest {
        Rest { queues, device: device.into(), held: Some(held) }
    }
}

impl fmt::Debug for Rest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Rest { queues, device, held } = self;
        f.debug_struct("Rest").field("queues", queues).field("device", device).field("held", &held.is_some()).finish()
    }
}

/// The reasons why a device's state cannot be taken.
#[derive(Debug, thiserror::Error)]
pub enum NotAtRest {
    /// A request takes longer than the time limit.
    #[error("a request that it has begun does not end; look at the host's disk or network, and try again")]
    Busy,
    /// The disk's writes could not be made durable.
    #[error("its writes cannot be made durable: {0}")]
    Flush(std::io::Error),
}

/// The reasons why a device cannot continue from a saved state.
#[derive(Debug, thiserror::Error)]
pub enum RestoreDeviceError {
    /// The VM has another device there.
    #[error(
        "the snapshot has a device of kind {saved:?} there, and this VM one of kind {here:?}; name the devices in the \
         order in which the saved VM had them"
    )]
    OtherKind {
        /// Kind of the saved device.
        saved: DeviceKind,
        /// Kind of the device of this VM.
        here: DeviceKind,
    },
    /// A property that the guest knows is another one.
    #[error("its {what} is {here}, and was {saved}; {remedy}")]
    Other {
        /// Name of the property.
        what: &'static str,
        /// Value in the snapshot.
        saved: String,
        /// Value of this VM's device.
        here: String,
        /// What the operator does.
        remedy: &'static str,
    },
    /// The disk was written after the snapshot.
    #[error(
        "disk {id} was written after the snapshot, and the guest would read other data than it knows; use a copy of \
         the disk that was made with the snapshot"
    )]
    WrittenSince {
        /// Name of the disk.
        id: String,
    },
    /// The guest uses features that this device lacks.
    #[error("the guest uses features {0:#x} that it does not have; use the version that saved the VM")]
    Features(u64),
    /// The state is one that no driver can reach.
    #[error("its saved state is damaged: {0}")]
    Damaged(&'static str),
    /// The device could not start its work.
    #[error(transparent)]
    Activate(#[from] ActivateError),
}

/// An error where `saved` and `here` differ.
pub(super) fn unless_equal<T: PartialEq + fmt::Display>(
    what: &'static str,
    saved: &T,
    here: &T,
    remedy: &'static str,
) -> Result<(), RestoreDeviceError> {
    let other = || RestoreDeviceError::Other { what, saved: saved.to_string(), here: here.to_string(), remedy };
    if saved == here { Ok(()) } else { Err(other()) }
}

#[cfg(test)]
mod tests;
