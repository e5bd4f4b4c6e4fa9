//! The file of a snapshot before a restore: in the page cache or not, and how fast it is read.
//!
//! ```text
//!   warm   read, read again with the clock on
//!   cold   fsync, POSIX_FADV_DONTNEED, fincore: nothing; read with the clock on; POSIX_FADV_DONTNEED, fincore: nothing
//! ```

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use nix::errno::Errno;
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use nix::unistd::{Whence, lseek};
use wideleaf_experiments::restoring::Cache;
use wideleaf_run::failure::Failure;

/// Program that counts a file's pages in the page cache by `mincore(2)` (util-linux).
const FINCORE: &str = "fincore";
/// Bytes that are read at once: as a restore reads a window.
const PIECE_BYTES: usize = 2 << 20;
/// Most of a file that may stay in the page cache when it counts as cold, in per cent: pages that the kernel holds for
/// a moment.
const COLD_PERCENT_MAX: f64 = 0.5;
/// Least of a file that must be in the page cache when it counts as warm, in per cent.
const WARM_PERCENT_MIN: f64 = 99.0;

/// A file that is ready.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ready {
    /// Speed at which its data was read, in bytes a second.
    pub(super) read_bytes_per_s: f64,
    /// Share of its data in the page cache now, in per cent.
    pub(super) cached_percent: f64,
}

/// Brings the file into this state, and measures how fast it is read in it.
///
/// # Errors
/// [`Failure::Host`] if it cannot be, as on a file system in memory.
pub(super) fn prepare(path: &Path, cache: Cache) -> Result<Ready, Failure> {
    let file = File::open(path).map_err(|error| cannot("open", path, &error))?;
    let data = data_of(&file).map_err(|error| cannot("find the data of", path, &error))?;
    let bytes: u64 = data.iter().map(|(start, end)| end - start).sum();
    let read = || read_all(&file, &data).map_err(|error| cannot("read", path, &error));
    let (seconds, cached_percent) = match cache {
        Cache::Warm => {
            read()?;
            (read()?, cached_percent(path, bytes)?)
        }
        Cache::Cold => {
            file.sync_all().map_err(|error| cannot("write to the disk", path, &error))?;
            drop_from_cache(&file, path, bytes)?;
            let seconds = read()?;
            (seconds, drop_from_cache(&file, path, bytes)?)
        }
    };
    if cache == Cache::Warm && cached_percent < WARM_PERCENT_MIN {
        let why = format!("only {cached_percent:.1} % of it stay there: give the machine more free memory");
        return Err(cannot("keep in the page cache", path, &why));
    }
    Ok(Ready { read_bytes_per_s: bytes as f64 / seconds.max(1e-9), cached_percent })
}

fn cannot(what: &str, path: &Path, why: &dyn std::fmt::Display) -> Failure {
    Failure::Host(format!("cannot {what} {}: {why}", path.display()))
}

/// Drops the file from the page cache. Returns what is left there, in per cent.
fn drop_from_cache(file: &File, path: &Path, bytes: u64) -> Result<f64, Failure> {
    let advised = posix_fadvise(file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
    advised.map_err(|errno| cannot("drop from the page cache", path, &errno))?;
    match cached_percent(path, bytes)? {
        left if left <= COLD_PERCENT_MAX => Ok(left),
        left => {
            let why = format!("{left:.1} % of it stay there; set TMPDIR to a folder on a disk");
            Err(cannot("drop from the page cache", path, &why))
        }
    }
}

/// Share of a file's data in the page cache, in per cent.
fn cached_percent(path: &Path, bytes: u64) -> Result<f64, Failure> {
    let said = Command::new(FINCORE).args(["--bytes", "--noheadings", "--raw", "--output", "RES"]).arg(path).output();
    let said = said.map_err(|error| Failure::Host(format!("cannot start {FINCORE}: {error}; install util-linux")))?;
    let text = String::from_utf8_lossy(&said.stdout);
    let cached: u64 = text.trim().parse().map_err(|_| {
        cannot("count the pages of", path, &format!("{FINCORE} printed {:?}", String::from_utf8_lossy(&said.stderr)))
    })?;
    Ok(cached as f64 * 100.0 / bytes.max(1) as f64)
}

/// Parts of a file that are no holes (`lseek(2)`, `SEEK_DATA`).
fn data_of(file: &File) -> nix::Result<Vec<(u64, u64)>> {
    let (mut parts, mut at) = (Vec::new(), 0);
    loop {
        let start = match lseek(file, at, Whence::SeekData) {
            Err(Errno::ENXIO) => return Ok(parts),
            start => start?,
        };
        at = lseek(file, start, Whence::SeekHole)?;
        parts.push((start as u64, at as u64));
    }
}

/// Reads all of these parts, and returns the time it took in seconds.
fn read_all(file: &File, parts: &[(u64, u64)]) -> std::io::Result<f64> {
    let mut buffer = vec![0; PIECE_BYTES];
    let began = Instant::now();
    for (start, end) in parts {
        let mut at = *start;
        while at < *end {
            let wanted = PIECE_BYTES.min((end - at) as usize);
            match file.read_at(&mut buffer[..wanted], at)? {
                0 => break,
                count => at += count as u64,
            }
        }
    }
    Ok(began.elapsed().as_secs_f64())
}

/// Space of files on the disk, in MiB.
pub(super) fn disk_mib<'a>(paths: impl IntoIterator<Item = &'a Path>) -> f64 {
    use std::os::unix::fs::MetadataExt as _;
    /// Unit of `st_blocks` (stat(3type)), in bytes.
    const BLOCK_BYTES: u64 = 512;
    let blocks = |path: &Path| path.metadata().map_or(0, |metadata| metadata.blocks());
    (paths.into_iter().map(blocks).sum::<u64>() * BLOCK_BYTES) as f64 / super::super::wideleaf_run::MIB
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_data_of_a_sparse_file_is_read() {
        let file = tempfile::tempfile().expect("a file");
        for at in [1 << 20, 5 << 20] {
            file.write_all_at(&[7; 4096], at).expect("room");
        }
        let data = data_of(&file).expect("the file system says where its holes are");
        let bytes: u64 = data.iter().map(|(start, end)| end - start).sum();
        assert!((8192..4 << 20).contains(&bytes), "{data:?}");
        assert!(read_all(&file, &data).is_ok_and(|seconds| seconds > 0.0));
        assert!(data_of(&tempfile::tempfile().expect("a file")).is_ok_and(|data| data.is_empty()));
    }

    #[test]
    fn a_file_is_warm_when_it_is_read_and_cold_when_it_is_dropped() {
        if Command::new(FINCORE).arg("--version").output().is_err() {
            println!("skipped: {FINCORE} is not installed");
            return;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("memory");
        std::fs::write(&path, vec![7; 1 << 20]).expect("room");
        let warm = prepare(&path, Cache::Warm).expect("it is small");
        assert!(warm.cached_percent >= WARM_PERCENT_MIN && warm.read_bytes_per_s > 0.0, "{warm:?}");
        match prepare(&path, Cache::Cold) {
            Ok(cold) => assert!(cold.cached_percent <= COLD_PERCENT_MAX, "{cold:?}"),
            Err(error) => assert!(error.to_string().contains("set TMPDIR"), "{error}"),
        }
    }
}
