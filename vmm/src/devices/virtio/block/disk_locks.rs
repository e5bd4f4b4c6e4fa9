//! The locks of all disks of a VM, and their way to another VM that continues the same guest.
//!
//! ```text
//!   a VM that begins   lock (F_OFD_SETLK) ──▶ in use ── give_up: file noted, unlocked ──▶ not in use ─┐
//!                                               ▲                                                     │
//!                                               └──── the file as noted? ◀── lock ◀────────── take ───┤
//!   a VM that arrives  locked by another process (F_OFD_GETLK)? ── yes: not in use ── take ── lock ───┴▶ in use
//! ```
//!
//! Where two hosts share a file system, no number of the file is the same on both: device numbers are each host's own.
//! What both see is the lock, so a VM that arrives looks for the lock of the VM that it replaces. A copy of the disk
//! has none, and neither has a file system that keeps locks to one host (NFS with `nolock` or `local_lock`).

use std::sync::Arc;

use super::image::{DiskError, DiskImage};

/// The locks of a VM's writable disks, beside the devices that use them.
#[derive(Clone, Debug, Default)]
pub struct DiskLocks(Vec<Arc<DiskImage>>);

impl DiskLocks {
    /// The locks of these disks.
    pub fn of(images: impl IntoIterator<Item = Arc<DiskImage>>) -> DiskLocks {
        DiskLocks(images.into_iter().filter(|image| !image.is_read_only()).collect())
    }

    /// Gives up all locks. The disks are at rest, and their writes are durable
    /// ([`MachineSaver::save_state`](crate::machine::MachineSaver::save_state)); from now on no request of the guest
    /// reaches them, until [`DiskLocks::take`].
    ///
    /// # Errors
    /// [`DiskError`] of the first disk that has one; some locks may be given up then.
    pub fn give_up(&self) -> Result<(), DiskError> {
        self.0.iter().try_for_each(|image| image.give_up())
    }

    /// Leaves the requests of the guest in the rings, so that the files stay as they are: for a VM that stays paused at
    /// an instant that is saved. A request that was begun is completed.
    pub fn rest(&self) {
        self.0.iter().for_each(|image| image.set_resting(true));
    }

    /// Undoes [`DiskLocks::rest`]. The devices must look at their rings afterwards
    /// ([`Machine::queue_kicker`](crate::machine::Machine::queue_kicker)).
    pub fn go_on(&self) {
        self.0.iter().for_each(|image| image.set_resting(false));
    }

    /// Lets no request reach the disks any more. The locks end with the open files, which the devices have.
    pub fn abandon(&self) {
        self.0.iter().for_each(|image| image.abandon());
    }

    /// Takes all locks that this process does not have: all, or none of those.
    ///
    /// # Errors
    /// [`DiskError::Elsewhere`] for a disk that another process has locked, [`DiskError::WrittenMeanwhile`] for one
    /// that is not as it was when its lock was given up.
    pub fn take(&self) -> Result<(), DiskError> {
        let mut taken = Vec::new();
        for image in self.0.iter().filter(|image| !image.is_ours()) {
            if let Err(error) = image.take() {
                taken.into_iter().try_for_each(|image: &Arc<DiskImage>| image.give_up())?;
                return Err(error);
            }
            taken.push(image);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;
    use std::time::{Duration, SystemTime};

    use super::super::DiskOptions;
    use super::*;

    fn file() -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4096).unwrap();
        file
    }

    fn options(file: &tempfile::NamedTempFile) -> DiskOptions {
        DiskOptions { path: file.path().to_owned(), ..DiskOptions::default() }
    }

    /// The disk of a VM that runs, and the same one of a VM that is to replace it.
    fn both(file: &tempfile::NamedTempFile) -> [Arc<DiskImage>; 2] {
        let here = DiskImage::open(&options(file)).unwrap();
        [here, DiskImage::open_arriving(&options(file)).unwrap()].map(Arc::new)
    }

    #[test]
    fn a_lock_passes_to_the_vm_that_arrives_and_back_and_one_of_them_uses_the_disk() {
        let file = file();
        let [source, target] = both(&file);
        let (at_source, at_target) = (DiskLocks::of([source.clone()]), DiskLocks::of([target.clone()]));
        let used = || [&source, &target].map(|image| image.flush().is_ok());
        assert_eq!(used(), [true, false]);
        let error = at_target.take().unwrap_err();
        assert!(
            matches!(error, DiskError::Elsewhere { holder: Some(pid), .. } if pid == std::process::id()),
            "{error}"
        );
        at_source.give_up().unwrap();
        assert_eq!(used(), [false, false]);
        at_target.take().unwrap();
        assert_eq!(used(), [false, true]);
        at_source.take().unwrap_err();
        drop((target, at_target));
        at_source.take().unwrap();
        at_source.take().unwrap();
        assert!(source.flush().is_ok() && DiskImage::open(&options(&file)).is_err());
    }

    #[test]
    fn a_file_that_no_other_process_has_locked_is_not_the_disk_of_a_vm_that_arrives() {
        let file = file();
        let error = DiskImage::open_arriving(&options(&file)).unwrap_err();
        assert!(matches!(error, DiskError::NotLocked(_)), "{error}");
        let read_only = DiskOptions { is_read_only: true, ..options(&file) };
        let readers = [DiskImage::open_arriving(&read_only), DiskImage::open_arriving(&read_only)];
        assert!(readers.into_iter().all(|image| image.is_ok_and(|image| image.is_ours())));
    }

    #[test]
    fn a_disk_that_was_written_after_it_was_given_up_is_not_taken_again() {
        let file = file();
        let [source, target] = both(&file);
        source.give_up().unwrap();
        target.take().unwrap();
        target.give_up().unwrap();
        source.take().unwrap();
        source.give_up().unwrap();
        file.as_file().write_all_at(b"by another", 0).unwrap();
        // The clock of a file system is coarse.
        file.as_file().set_modified(SystemTime::now() + Duration::from_secs(1)).unwrap();
        assert!(matches!(source.take(), Err(DiskError::WrittenMeanwhile(_))));
        assert!(source.flush().is_err() && DiskImage::open(&options(&file)).is_ok(), "its lock is free");
    }

    #[test]
    fn disks_are_taken_together_or_not_at_all() {
        let files = [file(), file()];
        let [first, second] = [0, 1].map(|of| Arc::new(DiskImage::open(&options(&files[of])).unwrap()));
        let locks = DiskLocks::of([first, second]);
        locks.give_up().unwrap();
        let other = DiskImage::open(&options(&files[1])).unwrap();
        locks.take().unwrap_err();
        drop(DiskImage::open(&options(&files[0])).unwrap());
        drop(other);
        locks.take().unwrap();
        assert!(files.iter().all(|file| DiskImage::open(&options(file)).is_err()));
    }

    #[test]
    fn an_abandoned_disk_does_nothing_and_stays_locked() {
        let file = file();
        let image = Arc::new(DiskImage::open(&options(&file)).unwrap());
        DiskLocks::of([image.clone()]).abandon();
        assert!(image.write_zeroes(0, 512, true, &|| false).is_err() && image.discard(0, 512).is_err());
        assert!(DiskImage::open(&options(&file)).is_err());
    }
}
