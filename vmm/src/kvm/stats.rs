//! KVM's binary statistics (KVM API, 4.133 `KVM_GET_STATS_FD`; Linux 5.14).
//!
//! ```text
//!   file:   header │ id string │ descriptors (name, offset, size) │ data (u64 each)
//! ```
//!
//! Header and descriptors never change while the file is open, so they are read once; a sample is one `pread`
//! of the data.
#![expect(unsafe_code, reason = "no crate wraps KVM_GET_STATS_FD")]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

use vmm_sys_util::ioctl::{_IOC_NONE, ioctl, ioctl_expr};
use wideleaf_policies::MappingStats;

/// KVM's ioctl type (linux/kvm.h).
const KVMIO: u32 = 0xae;
const KVM_GET_STATS_FD: libc::c_ulong = ioctl_expr(_IOC_NONE, KVMIO, 0xce, 0);

/// Size of a `struct kvm_stats_header`, in bytes.
const HEADER_BYTES: usize = 24;
/// Size of a `struct kvm_stats_desc` before the name, in bytes.
const DESCRIPTOR_BYTES: usize = 16;
/// Size limit of a statistics file, far above any kernel's: Linux 6.18 has 20 statistics per VM and 60 per vCPU,
/// with names of 48 bytes.
const FILE_BYTES_MAX: usize = 1 << 20;

/// The reasons why statistics cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum StatsError {
    /// The kernel refuses to give them.
    #[error("{what} failed: {source}")]
    Kernel {
        /// Name of the failed request.
        what: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// The file does not match the KVM API.
    #[error("cannot read KVM's statistics: {what} at byte {at} lies outside their {bytes} bytes")]
    Malformed {
        /// Name of the malformed part.
        what: &'static str,
        /// Offset of that part in the file, in bytes.
        at: usize,
        /// Size of the file, in bytes.
        bytes: usize,
    },
    /// KVM has no statistic of this name.
    #[error("this kernel's KVM has no statistic {0}")]
    NoSuchStatistic(&'static str),
}

/// One statistic: the place of its values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Statistic {
    /// Name of the statistic, like `pages_2m`.
    pub name: String,
    /// Offset of its first value, in bytes from the start of the data.
    pub offset: usize,
    /// Number of its values: more than one for a histogram.
    pub values: usize,
}

/// The unchanging part of a statistics file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatsLayout {
    /// All statistics, in KVM's order.
    pub statistics: Vec<Statistic>,
    /// Offset of the data in the file, in bytes.
    pub data_offset: usize,
    /// Size of the data, in bytes.
    pub data_bytes: usize,
}

impl StatsLayout {
    /// Reads header and descriptors from the beginning of a statistics file.
    ///
    /// # Errors
    /// [`StatsError::Malformed`] where a part lies outside `file`.
    pub fn parse(file: &[u8]) -> Result<StatsLayout, StatsError> {
        let header = Header::parse(file)?;
        let stride = DESCRIPTOR_BYTES.saturating_add(header.name_bytes);
        let mut statistics = Vec::new();
        let mut data_bytes = 0;
        for index in 0..header.descriptors {
            let at = header.descriptors_offset.saturating_add(index.saturating_mul(stride));
            let malformed = || StatsError::Malformed { what: "a descriptor", at, bytes: file.len() };
            let bytes = file.get(at..).and_then(|rest| rest.get(..stride)).ok_or_else(malformed)?;
            // struct kvm_stats_desc: u32 flags, s16 exponent, u16 size, u32 offset, u32 bucket_size, name
            let values = usize::from(read_u16(bytes, 6).ok_or_else(malformed)?);
            let offset = read_u32(bytes, 8).ok_or_else(malformed)? as usize;
            let name = &bytes[DESCRIPTOR_BYTES..];
            let name = name.split(|byte| *byte == 0).next().unwrap_or(name);
            let name = String::from_utf8_lossy(name).into_owned();
            data_bytes = data_bytes.max(offset.saturating_add(values.saturating_mul(8)));
            statistics.push(Statistic { name, offset, values });
        }
        if data_bytes > FILE_BYTES_MAX {
            return Err(StatsError::Malformed { what: "a value", at: data_bytes, bytes: FILE_BYTES_MAX });
        }
        Ok(StatsLayout { statistics, data_offset: header.data_offset, data_bytes })
    }

    fn place_of(&self, name: &'static str) -> Result<usize, StatsError> {
        self.offset_of(name).ok_or(StatsError::NoSuchStatistic(name))
    }

    /// Offset of the statistic's first value, in bytes from the start of the data.
    pub fn offset_of(&self, name: &str) -> Option<usize> {
        self.statistics.iter().find(|statistic| statistic.name == name && statistic.values > 0).map(|s| s.offset)
    }
}

/// `struct kvm_stats_header`: u32 flags, name_size, num_desc, id_offset, desc_offset, data_offset.
struct Header {
    name_bytes: usize,
    descriptors: usize,
    descriptors_offset: usize,
    data_offset: usize,
}

impl Header {
    fn parse(file: &[u8]) -> Result<Header, StatsError> {
        let field = |at| read_u32(file, at).ok_or(StatsError::Malformed { what: "the header", at, bytes: file.len() });
        Ok(Header {
            name_bytes: field(4)? as usize,
            descriptors: field(8)? as usize,
            descriptors_offset: field(16)? as usize,
            data_offset: field(20)? as usize,
        })
    }

    /// Length of everything in front of the data, which has to be read once.
    fn file_bytes(&self) -> usize {
        let descriptors = self.descriptors.saturating_mul(DESCRIPTOR_BYTES.saturating_add(self.name_bytes));
        self.descriptors_offset.saturating_add(descriptors)
    }
}

/// Asks KVM for the statistics file of a VM or a vCPU.
fn statistics_of(kvm_fd: &impl AsRawFd) -> Result<File, StatsError> {
    // SAFETY: the ioctl takes no argument and gives a new file descriptor or -1.
    let fd = unsafe { ioctl(kvm_fd, KVM_GET_STATS_FD) };
    if fd < 0 {
        return Err(StatsError::Kernel { what: "KVM_GET_STATS_FD", source: io::Error::last_os_error() });
    }
    // SAFETY: the descriptor is new, and no other object owns it.
    Ok(unsafe { File::from_raw_fd(fd) })
}

fn layout_of(file: &File) -> Result<StatsLayout, StatsError> {
    let read_error = |source| StatsError::Kernel { what: "reading KVM's statistics", source };
    let mut header = [0; HEADER_BYTES];
    file.read_exact_at(&mut header, 0).map_err(read_error)?;
    let bytes = Header::parse(&header)?.file_bytes();
    if bytes > FILE_BYTES_MAX {
        return Err(StatsError::Malformed { what: "the last descriptor", at: bytes, bytes: FILE_BYTES_MAX });
    }
    let mut front = vec![0; bytes.max(HEADER_BYTES)];
    file.read_exact_at(&mut front, 0).map_err(read_error)?;
    StatsLayout::parse(&front)
}

/// The present values of all statistics of a file.
fn data_of(file: &File, layout: &StatsLayout) -> Result<Vec<u8>, StatsError> {
    let mut data = vec![0; layout.data_bytes];
    file.read_exact_at(&mut data, layout.data_offset as u64)
        .map_err(|source| StatsError::Kernel { what: "reading KVM's statistics", source })?;
    Ok(data)
}

/// An open statistics file of a VM.
#[derive(Debug)]
pub struct KvmStats {
    file: File,
    layout: StatsLayout,
    pages: [usize; 3],
}

impl KvmStats {
    /// Opens the statistics of the VM behind `kvm_fd`.
    ///
    /// # Errors
    /// [`StatsError`]; `NoSuchStatistic` where one of the three counts of mappings is missing.
    pub fn open(kvm_fd: &impl AsRawFd) -> Result<KvmStats, StatsError> {
        let file = statistics_of(kvm_fd)?;
        let layout = layout_of(&file)?;
        let pages = [layout.place_of("pages_4k")?, layout.place_of("pages_2m")?, layout.place_of("pages_1g")?];
        Ok(KvmStats { file, layout, pages })
    }

    /// Layout of the file.
    pub fn layout(&self) -> &StatsLayout {
        &self.layout
    }

    /// KVM's count of leaf mappings by size, now.
    ///
    /// # Errors
    /// [`StatsError::Kernel`] where the file cannot be read.
    pub fn mapping_stats(&self) -> Result<MappingStats, StatsError> {
        let data = data_of(&self.file, &self.layout)?;
        let [pages_4k, pages_2m, pages_1g] = self.pages.map(|offset| read_u64(&data, offset).unwrap_or(0));
        Ok(MappingStats { pages_4k, pages_2m, pages_1g })
    }

    /// The first value of any statistic, now.
    ///
    /// # Errors
    /// [`StatsError`]; `NoSuchStatistic` where KVM has no statistic of that name.
    pub fn value(&self, name: &'static str) -> Result<u64, StatsError> {
        let offset = self.layout.place_of(name)?;
        Ok(read_u64(&data_of(&self.file, &self.layout)?, offset).unwrap_or(0))
    }
}

/// Counts of one vCPU since it was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VcpuCounts {
    /// Number of second-level faults after which KVM had entered a mapping (`pf_fixed`).
    pub faults: u64,
    /// Number of times that the vCPU left the guest, for any reason (`exits`).
    pub exits: u64,
}

/// An open statistics file of a vCPU. Its layout is read at the first use.
#[derive(Debug)]
pub struct VcpuStats {
    file: File,
    offsets: OnceLock<Result<VcpuCountOffsets, StatsError>>,
}

/// The part of a vCPU's statistics file that is read.
#[derive(Debug)]
pub struct VcpuCountOffsets {
    layout: StatsLayout,
    pf_fixed: usize,
    exits: usize,
}

impl VcpuStats {
    /// Opens the statistics of the vCPU behind `vcpu_fd`, which must not run: KVM holds the vCPU's lock during
    /// `KVM_RUN`, and would answer when the guest next leaves to this program. The open file needs no lock.
    ///
    /// # Errors
    /// [`StatsError::Kernel`] where KVM has no statistics (before Linux 5.14).
    pub fn open(vcpu_fd: &impl AsRawFd) -> Result<VcpuStats, StatsError> {
        Ok(VcpuStats { file: statistics_of(vcpu_fd)?, offsets: OnceLock::new() })
    }

    /// Offsets of the counts in the file.
    ///
    /// # Errors
    /// [`StatsError`], the same one each time; `NoSuchStatistic` where KVM does not count faults or exits.
    pub fn offsets(&self) -> Result<&VcpuCountOffsets, &StatsError> {
        let offsets = || {
            let layout = layout_of(&self.file)?;
            Ok(VcpuCountOffsets { pf_fixed: layout.place_of("pf_fixed")?, exits: layout.place_of("exits")?, layout })
        };
        self.offsets.get_or_init(offsets).as_ref()
    }

    /// The vCPU's counts, now.
    ///
    /// # Errors
    /// [`StatsError::Kernel`] where the file cannot be read.
    pub fn counts(&self, offsets: &VcpuCountOffsets) -> Result<VcpuCounts, StatsError> {
        let data = data_of(&self.file, &offsets.layout)?;
        let value = |offset| read_u64(&data, offset).unwrap_or(0);
        Ok(VcpuCounts { faults: value(offsets.pf_fixed), exits: value(offsets.exits) })
    }
}

fn read_u16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn read_u32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn read_u64(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME_BYTES: usize = 48;

    /// A statistics file: header, an id string of `NAME_BYTES`, the descriptors.
    fn stats_file(descriptors: &[(&str, u16, u32)]) -> Vec<u8> {
        let descriptors_offset = HEADER_BYTES + NAME_BYTES;
        let data_offset = descriptors_offset + descriptors.len() * (DESCRIPTOR_BYTES + NAME_BYTES);
        let header = [0, NAME_BYTES, descriptors.len(), HEADER_BYTES, descriptors_offset, data_offset];
        let mut file: Vec<u8> = header.iter().flat_map(|field| (*field as u32).to_ne_bytes()).collect();
        file.resize(descriptors_offset, 0);
        for (name, values, offset) in descriptors {
            file.extend(0x12u32.to_ne_bytes());
            file.extend((-9i16).to_ne_bytes());
            file.extend(values.to_ne_bytes());
            file.extend(offset.to_ne_bytes());
            file.extend(7u32.to_ne_bytes());
            let mut padded = name.as_bytes().to_vec();
            padded.resize(NAME_BYTES, 0);
            file.extend(padded);
        }
        file
    }

    #[test]
    fn names_offsets_and_sizes_come_from_the_descriptors() {
        let file = stats_file(&[("remote_tlb_flush", 1, 0), ("halt_poll_hist", 32, 8), ("pages_2m", 1, 264)]);
        let layout = StatsLayout::parse(&file).unwrap();
        assert_eq!(layout.statistics.len(), 3);
        assert_eq!(layout.statistics[1], Statistic { name: "halt_poll_hist".to_owned(), offset: 8, values: 32 });
        assert_eq!(layout.offset_of("pages_2m"), Some(264));
        assert_eq!(layout.offset_of("pages_1g"), None);
        assert_eq!(layout.data_bytes, 272);
        assert_eq!(layout.data_offset, file.len());
    }

    #[test]
    fn a_name_that_fills_its_field_is_read_whole() {
        let name = "n".repeat(NAME_BYTES);
        let layout = StatsLayout::parse(&stats_file(&[(&name, 1, 0)])).unwrap();
        assert_eq!(layout.statistics[0].name, name);
    }

    #[test]
    fn a_file_cut_at_any_byte_is_malformed() {
        let file = stats_file(&[("pages_4k", 1, 0), ("pages_2m", 1, 8)]);
        for bytes in 0..file.len() {
            let error = StatsLayout::parse(&file[..bytes]).unwrap_err();
            assert!(matches!(error, StatsError::Malformed { .. }), "{bytes}: {error}");
        }
    }

    #[test]
    fn implausibly_large_numbers_are_refused() {
        let mut endless = stats_file(&[("pages_4k", 1, 0)]);
        endless[8..12].copy_from_slice(&u32::MAX.to_ne_bytes());
        assert!(StatsLayout::parse(&endless).is_err());
        let far = stats_file(&[("pages_4k", 1, u32::MAX)]);
        assert!(matches!(StatsLayout::parse(&far), Err(StatsError::Malformed { what: "a value", .. })));
    }
}
