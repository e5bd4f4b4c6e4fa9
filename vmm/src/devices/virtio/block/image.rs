//! The file behind a disk: opened, measured and locked before there is a VM, then read and written by the disk's
//! thread. [`super::disk_locks`] passes all locks of a VM on.
//!
//! ```text
//!   writable   exclusive lock, which may pass to another VM and come back; without it, nothing is read or written
//!   read-only  shared lock
//! ```

use std::fs::{File, OpenOptions};
use std::io::{self, Seek as _, SeekFrom};
use std::os::unix::fs::{FileExt as _, FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::fcntl::{FallocateFlags, OFlag, fallocate};
use parking_lot::{Mutex, MutexGuard};
use wideleaf_memory::input_file::kind_name;

use super::{SECTOR_BYTES, lock};
use crate::devices::virtio::pieces::Piece;
use crate::devices::virtio::saved::{SavedDisk, SavedFile, unless_equal};
use crate::devices::virtio::{ActivateError, RestoreDeviceError};
use crate::sys::vectored;

/// Length of a disk's name, in bytes (5.2.6, GET_ID).
pub const ID_BYTES: usize = 20;

/// Number of zeroes written at once where the file system has no better way, in bytes.
const ZEROES: usize = 1 << 20;

/// The options of a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskOptions {
    /// Path of the file.
    pub path: PathBuf,
    /// Whether the guest cannot write it.
    #[serde(default)]
    pub is_read_only: bool,
    /// Name that the guest reads, at most [`ID_BYTES`] long; `None` uses the file's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
}

/// An open disk.
#[derive(Debug)]
pub struct DiskImage {
    file: File,
    bytes: u64,
    is_read_only: bool,
    is_regular: bool,
    hole_bytes: u64,
    id: [u8; ID_BYTES],
    path: PathBuf,
    /// Whether a flush has failed: see [`DiskImage::flush`]. Locked during each one.
    has_failed: Mutex<bool>,
    /// Whether the file is locked for this VM, which may then use it.
    is_ours: AtomicBool,
    /// Whether requests stay in the ring for now.
    rests: AtomicBool,
    /// The file when its lock was given up, if it was.
    given_up: Mutex<Option<SavedFile>>,
}

/// The reasons why a disk cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// The file does not exist.
    #[error("cannot open disk {}: it does not exist; create an empty one with `truncate -s 1G FILE`", .0.display())]
    Missing(PathBuf),
    /// The file is a folder, a FIFO or a terminal.
    #[error("cannot open disk {}: it is {kind}; use a file or a block device", path.display())]
    NotADisk {
        /// Path of the file.
        path: PathBuf,
        /// Kind of the file.
        kind: &'static str,
    },
    /// This user lacks the permission.
    #[error("cannot open disk {}: this user may not {} it{}", path.display(),
        if *.is_read_only { "read" } else { "write" },
        if *.is_read_only { "" } else { "; add `,readonly`, or change its permissions" })]
    Denied {
        /// Path of the file.
        path: PathBuf,
        /// Whether it was opened read-only.
        is_read_only: bool,
    },
    /// The size is zero or ends inside a sector.
    #[error(
        "cannot open disk {}: it has {bytes} bytes; use one or more whole sectors of {SECTOR_BYTES} bytes",
        path.display()
    )]
    NotSectors {
        /// Path of the file.
        path: PathBuf,
        /// Size of the file, in bytes.
        bytes: u64,
    },
    /// Another process has locked it.
    #[error("cannot open disk {}: it is in use{}; give it to one VM only, or open it with `,readonly` in all of \
        them", path.display(),
        holder.map_or(String::new(), |pid| format!(" by process {pid}")))]
    InUse {
        /// Path of the file.
        path: PathBuf,
        /// Process that holds the lock, where the kernel shows it.
        holder: Option<u32>,
    },
    /// No process has locked it, and the VM that arrives has locked its disk.
    #[error("cannot use disk {}: the VM that arrives has its disk locked, and this file is not: name its own file, on \
        a file system that passes locks from host to host", .0.display())]
    NotLocked(PathBuf),
    /// Another process has locked it while its lock was given up.
    #[error("cannot lock disk {}: another process{} has locked it", path.display(),
        holder.map_or(String::new(), |pid| format!(", {pid},")))]
    Elsewhere {
        /// Path of the file.
        path: PathBuf,
        /// Process that holds the lock, where the kernel shows it.
        holder: Option<u32>,
    },
    /// It was written while its lock was given up.
    #[error("cannot use disk {} again: it was written after its lock was given up, and the guest would read other data \
        than it knows; stop this VM", .0.display())]
    WrittenMeanwhile(PathBuf),
    /// The name is too long, or is not printable ASCII.
    #[error(
        "cannot use id {id:?} of {} bytes: a disk's name has at most {ID_BYTES} bytes of printable ASCII",
        id.len()
    )]
    Id {
        /// Requested name of the disk.
        id: String,
    },
    /// The kernel refused a call.
    #[error("cannot use disk {}: {source}", path.display())]
    Host {
        /// Path of the file.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
}

fn is_same_file(a: SavedFile, b: SavedFile) -> bool {
    (a.device, a.inode) == (b.device, b.inode)
}

impl DiskImage {
    /// Opens and locks a disk.
    ///
    /// # Errors
    /// [`DiskError`] for any failure.
    pub fn open(options: &DiskOptions) -> Result<DiskImage, DiskError> {
        let image = DiskImage::open_unlocked(options)?;
        if lock::lock(&image.file, image.is_read_only).map_err(|source| image.host(source))? {
            image.is_ours.store(true, Ordering::Release);
            return Ok(image);
        }
        let holder = lock::holder_of(&image.file, Path::new("/proc"));
        Err(DiskError::InUse { path: image.path, holder })
    }

    /// Opens the disk of a VM that arrives. One that can be written is still locked by the VM that it replaces, and is
    /// not used before [`DiskImage::take`]. A read-only one is locked as ever.
    ///
    /// # Errors
    /// [`DiskError`] for any failure, [`DiskError::NotLocked`] where the disk is not locked elsewhere: then it is not
    /// that VM's.
    pub fn open_arriving(options: &DiskOptions) -> Result<DiskImage, DiskError> {
        if options.is_read_only {
            return DiskImage::open(options);
        }
        let image = DiskImage::open_unlocked(options)?;
        let is_locked = lock::is_locked_elsewhere(&image.file).map_err(|source| image.host(source))?;
        if is_locked { Ok(image) } else { Err(DiskError::NotLocked(image.path)) }
    }

    fn open_unlocked(options: &DiskOptions) -> Result<DiskImage, DiskError> {
        let DiskOptions { path, is_read_only, .. } = options;
        let id = id_of(options)?;
        let host = |source| DiskError::Host { path: path.clone(), source };
        // Checked before the file is opened: opening a FIFO waits, and opening a device can have any effect.
        check_kind(path, *is_read_only)?;
        let open = OpenOptions::new()
            .read(true)
            .write(!is_read_only)
            .custom_flags(OFlag::O_CLOEXEC.bits() | OFlag::O_NONBLOCK.bits())
            .open(path);
        let mut file = open.map_err(|source| from_open(path, *is_read_only, source))?;
        let metadata = file.metadata().map_err(host)?;
        let is_regular = metadata.is_file();
        // The size of a block device is its end position.
        let bytes = if is_regular { metadata.len() } else { file.seek(SeekFrom::End(0)).map_err(host)? };
        if bytes == 0 || !bytes.is_multiple_of(SECTOR_BYTES) {
            return Err(DiskError::NotSectors { path: path.clone(), bytes });
        }
        Ok(DiskImage {
            file,
            bytes,
            is_read_only: *is_read_only,
            is_regular,
            hole_bytes: metadata.blksize().max(SECTOR_BYTES),
            id,
            path: path.clone(),
            has_failed: Mutex::default(),
            is_ours: AtomicBool::new(false),
            rests: AtomicBool::new(false),
            given_up: Mutex::default(),
        })
    }

    /// Whether the file is locked for this VM. Without that, nothing is read or written.
    pub fn is_ours(&self) -> bool {
        self.is_ours.load(Ordering::Acquire)
    }

    /// Whether a request may be taken from the ring.
    pub fn takes_requests(&self) -> bool {
        self.is_ours() && !self.rests()
    }

    /// Whether requests stay in the ring for now.
    pub fn rests(&self) -> bool {
        self.rests.load(Ordering::Acquire)
    }

    /// Leaves requests in the ring, or takes them again: then the device must look at its queue.
    pub fn set_resting(&self, rests: bool) {
        self.rests.store(rests, Ordering::Release);
    }

    /// Unlocks a file that can be written, for another VM. No request is under way, and all writes are durable.
    ///
    /// # Errors
    /// [`DiskError::Host`].
    pub fn give_up(&self) -> Result<(), DiskError> {
        if self.is_read_only || !self.is_ours() {
            return Ok(());
        }
        *self.given_up() = self.saved_file().map_err(|source| self.host(source))?;
        self.is_ours.store(false, Ordering::Release);
        lock::unlock(&self.file).map_err(|source| self.host(source))
    }

    /// Reads and writes nothing any more; the file stays locked while it is open.
    pub fn abandon(&self) {
        self.is_ours.store(false, Ordering::Release);
    }

    /// Locks the file, of a VM that has arrived, or again after [`DiskImage::give_up`].
    ///
    /// # Errors
    /// [`DiskError::Elsewhere`] and [`DiskError::WrittenMeanwhile`]; it is then not locked, nor used.
    pub fn take(&self) -> Result<(), DiskError> {
        if self.is_ours() {
            return Ok(());
        }
        if !lock::lock(&self.file, self.is_read_only).map_err(|source| self.host(source))? {
            let holder = lock::holder_of(&self.file, Path::new("/proc"));
            return Err(DiskError::Elsewhere { path: self.path.clone(), holder });
        }
        let (before, now) = (*self.given_up(), self.saved_file().map_err(|source| self.host(source))?);
        if before.is_some_and(|before| now != Some(before)) {
            lock::unlock(&self.file).map_err(|source| self.host(source))?;
            return Err(DiskError::WrittenMeanwhile(self.path.clone()));
        }
        self.is_ours.store(true, Ordering::Release);
        Ok(())
    }

    fn given_up(&self) -> MutexGuard<'_, Option<SavedFile>> {
        // Set in one step, so it is whole after a panic elsewhere.
        self.given_up.lock()
    }

    fn host(&self, source: io::Error) -> DiskError {
        DiskError::Host { path: self.path.clone(), source }
    }

    /// The file, where this VM may use it.
    fn ours(&self) -> io::Result<&File> {
        if self.is_ours() {
            return Ok(&self.file);
        }
        Err(io::Error::other("the disk is not locked for this VM: it belongs to another one"))
    }

    /// Size of the disk when it was opened, in bytes; the guest never learns another.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Size of the disk in sectors.
    pub fn sectors(&self) -> u64 {
        self.bytes / SECTOR_BYTES
    }

    /// Whether the guest cannot write it.
    pub fn is_read_only(&self) -> bool {
        self.is_read_only
    }

    /// Whether pieces of it can be given back, and made zero without being written: only files. Block devices need
    /// ioctls for it, which are not offered.
    pub fn can_zero(&self) -> bool {
        self.is_regular && !self.is_read_only
    }

    /// Size of the smallest hole in the file, in sectors.
    pub fn hole_sectors(&self) -> u32 {
        u32::try_from(self.hole_bytes / SECTOR_BYTES).unwrap_or(1)
    }

    /// Name of the disk, padded with zeroes.
    pub fn id(&self) -> &[u8; ID_BYTES] {
        &self.id
    }

    /// Reads like [`vectored::read_at`].
    ///
    /// # Errors
    /// The kernel's error (`preadv(2)`).
    pub fn read_at(&self, pieces: &[Piece<'_>], offset: u64) -> io::Result<usize> {
        vectored::read_at(self.ours()?, pieces, offset)
    }

    /// Writes like [`vectored::write_at`].
    ///
    /// # Errors
    /// The kernel's error (`pwritev(2)`).
    pub fn write_at(&self, pieces: &[Piece<'_>], offset: u64) -> io::Result<usize> {
        vectored::write_at(self.ours()?, pieces, offset)
    }

    /// Makes all earlier writes durable. After one failure every flush fails: the kernel marks pages that it could
    /// not write as clean, so that the next call would succeed although their bytes are lost (`fsync(2)`). It tells the
    /// error to one call only, so a flush waits for the one before.
    ///
    /// # Errors
    /// The kernel's error (`fdatasync(2)`).
    pub fn flush(&self) -> io::Result<()> {
        self.flush_by(File::sync_data)
    }

    pub(super) fn flush_by(&self, sync: impl FnOnce(&File) -> io::Result<()>) -> io::Result<()> {
        let mut has_failed = self.has_failed.lock();
        if *has_failed {
            return Err(io::Error::other(
                "cannot flush: an earlier flush failed, and the file's content since then is unknown",
            ));
        }
        sync(self.ours()?).inspect_err(|_| *has_failed = true)
    }

    /// The disk's identity now, for a snapshot.
    ///
    /// # Errors
    /// The kernel's error (`statx(2)`).
    pub fn saved(&self) -> io::Result<SavedDisk> {
        let file = self.saved_file()?;
        Ok(SavedDisk { id: self.id_text(), bytes: self.bytes, is_read_only: self.is_read_only, file })
    }

    /// The file and its last change; `None` for a block device.
    fn saved_file(&self) -> io::Result<Option<SavedFile>> {
        let metadata = self.is_regular.then(|| self.file.metadata()).transpose()?;
        Ok(metadata.map(|metadata| SavedFile {
            device: metadata.dev(),
            inode: metadata.ino(),
            modified_s: metadata.mtime(),
            modified_ns: metadata.mtime_nsec(),
        }))
    }

    /// Checks that this is the disk of a snapshot: the same name and size and, where it is the same file, the same
    /// content. A copy of the disk is another file: the caller answers for its content.
    ///
    /// # Errors
    /// [`RestoreDeviceError`] with the difference.
    pub fn check_is(&self, saved: &SavedDisk) -> Result<(), RestoreDeviceError> {
        let here = self.saved().map_err(|source| ActivateError::Host { what: "cannot look at a disk", source })?;
        let way = |is_read_only| if is_read_only { "read-only" } else { "writable" };
        let ways = (way(saved.is_read_only), way(here.is_read_only));
        unless_equal("name", &saved.id, &here.id, "give the VM the disks of the snapshot, in the same order")?;
        unless_equal("size in bytes", &saved.bytes, &here.bytes, "give the VM the disk of the snapshot")?;
        unless_equal("mode", &ways.0, &ways.1, "open the disk as before")?;
        match (saved.file, here.file) {
            (Some(before), Some(now)) if is_same_file(before, now) && before != now => {
                Err(RestoreDeviceError::WrittenSince { id: here.id })
            }
            _ => Ok(()),
        }
    }

    /// The name without its padding.
    fn id_text(&self) -> String {
        let end = self.id.iter().position(|byte| *byte == 0).unwrap_or(ID_BYTES);
        String::from_utf8_lossy(&self.id[..end]).into_owned()
    }

    /// Releases the storage of a piece of the file, which then reads as zeroes. A file system without holes leaves
    /// the piece unchanged: a DISCARD is a hint.
    ///
    /// # Errors
    /// The kernel's error (`fallocate(2)`).
    pub fn discard(&self, offset: u64, bytes: u64) -> io::Result<()> {
        match self.allocate(FallocateFlags::FALLOC_FL_PUNCH_HOLE, offset, bytes) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(()),
            result => result,
        }
    }

    /// Makes a piece of the file zero: by a hole where allowed, else by allocated zeroes, else by written
    /// ones, until `is_stopped`.
    ///
    /// # Errors
    /// The kernel's error (`fallocate(2)`, `pwrite(2)`).
    pub fn write_zeroes(
        &self,
        offset: u64,
        bytes: u64,
        may_unmap: bool,
        is_stopped: &dyn Fn() -> bool,
    ) -> io::Result<()> {
        let hole = may_unmap.then_some(FallocateFlags::FALLOC_FL_PUNCH_HOLE);
        for way in hole.into_iter().chain([FallocateFlags::FALLOC_FL_ZERO_RANGE]) {
            match self.allocate(way, offset, bytes) {
                Err(error) if error.kind() == io::ErrorKind::Unsupported => {}
                result => return result,
            }
        }
        let zeroes = vec![0; ZEROES];
        let end = offset + bytes;
        let mut at = offset;
        while at < end && !is_stopped() {
            let piece = (end - at).min(ZEROES as u64);
            self.ours()?.write_all_at(&zeroes[..piece as usize], at)?;
            at += piece;
        }
        Ok(())
    }

    fn allocate(&self, way: FallocateFlags, offset: u64, bytes: u64) -> io::Result<()> {
        let number = |value| i64::try_from(value).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput));
        let way = way | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        fallocate(self.ours()?, way, number(offset)?, number(bytes)?).map_err(io::Error::from)
    }
}

fn id_of(options: &DiskOptions) -> Result<[u8; ID_BYTES], DiskError> {
    let name = options.path.file_name().unwrap_or_default().to_string_lossy();
    let text = match &options.id {
        Some(id) if id.len() > ID_BYTES || id.is_empty() || !id.bytes().all(|byte| byte.is_ascii_graphic()) => {
            return Err(DiskError::Id { id: id.clone() });
        }
        Some(id) => id.as_str(),
        None => &name[..name.floor_char_boundary(ID_BYTES)],
    };
    let mut id = [0; ID_BYTES];
    id[..text.len()].copy_from_slice(text.as_bytes());
    Ok(id)
}

fn check_kind(path: &Path, is_read_only: bool) -> Result<(), DiskError> {
    let metadata = std::fs::metadata(path).map_err(|source| from_open(path, is_read_only, source))?;
    let kind = metadata.file_type();
    if kind.is_file() || kind.is_block_device() {
        return Ok(());
    }
    Err(DiskError::NotADisk { path: path.to_owned(), kind: kind_name(kind) })
}

fn from_open(path: &Path, is_read_only: bool, source: io::Error) -> DiskError {
    let path = path.to_owned();
    match source.kind() {
        io::ErrorKind::NotFound => DiskError::Missing(path),
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => DiskError::Denied { path, is_read_only },
        _ => DiskError::Host { path, source },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(path: &Path) -> DiskOptions {
        DiskOptions { path: path.to_owned(), ..DiskOptions::default() }
    }

    fn file(bytes: u64) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(bytes).unwrap();
        file
    }

    #[test]
    fn an_unusable_disk_is_refused_with_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        let message = |path: &Path| DiskImage::open(&options(path)).unwrap_err().to_string();
        assert!(message(&folder.path().join("none")).contains("does not exist"));
        assert!(message(folder.path()).contains("is a folder"));
        assert!(message(Path::new("/dev/null")).contains("is a character device"));
        assert!(message(file(0).path()).contains("has 0 bytes"));
        assert!(message(file(1000).path()).contains("has 1000 bytes"));
        let fifo = folder.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(message(&fifo).contains("is a FIFO"));
    }

    #[test]
    fn a_writable_disk_has_one_owner_and_the_error_names_it() {
        let file = file(4096);
        let writable = options(file.path());
        let read_only = DiskOptions { is_read_only: true, ..writable.clone() };
        let first = DiskImage::open(&writable).unwrap();
        for second in [&writable, &read_only] {
            let error = DiskImage::open(second).unwrap_err();
            assert!(
                matches!(error, DiskError::InUse { holder: Some(pid), .. } if pid == std::process::id()),
                "{error}"
            );
        }
        drop(first);
        let readers = [DiskImage::open(&read_only).unwrap(), DiskImage::open(&read_only).unwrap()];
        assert!(matches!(DiskImage::open(&writable), Err(DiskError::InUse { .. })));
        drop(readers);
        DiskImage::open(&writable).unwrap();
    }

    #[test]
    fn after_a_failed_flush_no_flush_succeeds() {
        let file = file(512);
        let image = DiskImage::open(&options(file.path())).unwrap();
        image.flush().unwrap();
        image.flush_by(|_| Err(io::ErrorKind::Other.into())).unwrap_err();
        image.flush().unwrap_err();
    }

    #[test]
    fn a_flush_during_one_that_fails_does_not_succeed() {
        let file = file(512);
        let image = DiskImage::open(&options(file.path())).unwrap();
        std::thread::scope(|scope| {
            let mut second = None;
            let first = image.flush_by(|_| {
                let second = second.insert(scope.spawn(|| image.flush_by(|_| Ok(()))));
                // The kernel has told this call of the lost page. Without the lock, the second flush ends here.
                while !image.has_failed.is_locked() && !second.is_finished() {
                    std::thread::yield_now();
                }
                Err(io::ErrorKind::Other.into())
            });
            first.unwrap_err();
            second.unwrap().join().unwrap().unwrap_err();
        });
    }

    #[test]
    fn a_name_has_at_most_20_bytes_and_is_the_file_name_by_default() {
        let file = file(512);
        let named = |id: &str| DiskImage::open(&DiskOptions { id: Some(id.into()), ..options(file.path()) });
        assert_eq!(named("root").unwrap().id(), b"root\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
        for bad in ["", "a name", "123456789012345678901", "ä"] {
            assert!(matches!(named(bad), Err(DiskError::Id { .. })), "{bad:?}");
        }
        let own = file.path().file_name().unwrap().to_str().unwrap().to_owned();
        assert!(DiskImage::open(&options(file.path())).unwrap().id().starts_with(&own.as_bytes()[..own.len().min(20)]));
    }
}
