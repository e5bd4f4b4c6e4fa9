//! The time stamp counters of all vCPUs, which must continue in step and never go back.
//!
//! ```text
//!   guest's counter = host's counter * scale + offset        one offset for each vCPU, the same one as a rule
//!
//!   saved    host's counter at the last reading ─┐     offsets of all
//!   restored host's counter ─────────────────────┴─▶ distance, added to the offset that each vCPU had
//! ```
//!
//! Documentation/virt/kvm/devices/vcpu.rst, 4.1 (`KVM_VCPU_TSC_OFFSET`, Linux 5.16). An older KVM gets one value for
//! all vCPUs: it keeps counters in step that are written with the same value within a second (`kvm_synchronize_tsc`
//! in arch/x86/kvm/x86.c).

use std::os::fd::AsRawFd as _;

use kvm_bindings::{KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, kvm_device_attr};
use serde::{Deserialize, Serialize};

use super::{TSC, read_msrs, set_msr};
use crate::kvm::{KvmError, Vcpu};

const KVM: u8 = 0xae;
const SET_DEVICE_ATTR: u64 = nix::request_code_write!(KVM, 0xe1, size_of::<kvm_device_attr>());
/// KVM API, `KVM_GET_DEVICE_ATTR`: the sandbox names it too.
pub(crate) const GET_DEVICE_ATTR: u64 = nix::request_code_write!(KVM, 0xe2, size_of::<kvm_device_attr>());

/// The counter of one vCPU while it was paused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedTsc {
    /// Value of the counter, in its cycles.
    value: u64,
    /// Distance to the host's counter, modulo 2^64; `None` where KVM does not tell it.
    offset: Option<u64>,
}

impl SavedTsc {
    /// Takes the counter of a vCPU that is not in `KVM_RUN`.
    ///
    /// # Errors
    /// [`KvmError::Ioctl`] where KVM refuses a call.
    pub fn take(vcpu: &Vcpu) -> Result<SavedTsc, KvmError> {
        Ok(SavedTsc { value: value(vcpu)?, offset: offset(vcpu) })
    }
}

/// Lets the counters of all vCPUs continue, with the distances between them that they had. No vCPU has run; their
/// frequency is set.
///
/// # Errors
/// [`KvmError::Ioctl`] where KVM refuses a call; [`KvmError::TscGoesBack`] where it takes the value and does not use
/// it, as a KVM without hardware for it does.
pub fn continue_all(vcpus: &[Vcpu], saved: &[SavedTsc]) -> Result<(), KvmError> {
    set_all(vcpus, saved)?;
    for (vcpu, SavedTsc { value: saved, .. }) in vcpus.iter().zip(saved) {
        let here = value(vcpu)?;
        if here < *saved {
            return Err(KvmError::TscGoesBack { saved: *saved, here });
        }
    }
    Ok(())
}

fn set_all(vcpus: &[Vcpu], saved: &[SavedTsc]) -> Result<(), KvmError> {
    let Some(first) = vcpus.first() else { return Ok(()) };
    let offsets: Option<Vec<u64>> = saved.iter().map(|tsc| tsc.offset).collect();
    let (Some(offset_now), Some(offsets)) = (offset(first), offsets) else {
        let value = saved.iter().map(|tsc| tsc.value).max().unwrap_or_default();
        return vcpus.iter().try_for_each(|vcpu| set_value(vcpu, value));
    };
    let at_save = latest_of_host(saved, &offsets);
    // Read last: the time until the new offsets are in force only adds to the counters.
    let distance = at_save.wrapping_sub(value(first)?.wrapping_sub(offset_now));
    vcpus.iter().zip(&offsets).try_for_each(|(vcpu, offset)| set_offset(vcpu, offset.wrapping_add(distance)))
}

/// The host's counter when the last of the guest's counters was read, modulo 2^64: each vCPU's thread reads its own.
fn latest_of_host(saved: &[SavedTsc], offsets: &[u64]) -> u64 {
    let mut readings = saved.iter().zip(offsets).map(|(tsc, offset)| tsc.value.wrapping_sub(*offset));
    let first = readings.next().unwrap_or_default();
    // The readings are close to each other, and may lie on both sides of zero.
    let is_later = |a: u64, b: u64| a.wrapping_sub(b).cast_signed() > 0;
    readings.fold(first, |latest, reading| if is_later(reading, latest) { reading } else { latest })
}

fn value(vcpu: &Vcpu) -> Result<u64, KvmError> {
    Ok(read_msrs(vcpu, &[TSC])?.first().map_or(0, |msr| msr.data))
}

fn set_value(vcpu: &Vcpu, value: u64) -> Result<(), KvmError> {
    if set_msr(vcpu, TSC, value)? { Ok(()) } else { Err(KvmError::MsrNotSet { index: TSC, data: value }) }
}

fn offset(vcpu: &Vcpu) -> Option<u64> {
    let mut offset = 0_u64;
    let attribute = attribute(&raw mut offset);
    // SAFETY: the request reads `attribute` and writes the eight bytes at its `addr`, which is `offset`; both live
    // until the call returns. A KVM without the request or the attribute writes nothing and fails.
    let result = unsafe { libc::ioctl(vcpu.fd().as_raw_fd(), GET_DEVICE_ATTR, &raw const attribute) };
    (result == 0).then_some(offset)
}

fn set_offset(vcpu: &Vcpu, offset: u64) -> Result<(), KvmError> {
    let mut offset = offset;
    let attribute = attribute(&raw mut offset);
    // SAFETY: the request reads `attribute` and the eight bytes at its `addr`, which is `offset`; both live until the
    // call returns.
    let result = unsafe { libc::ioctl(vcpu.fd().as_raw_fd(), SET_DEVICE_ATTR, &raw const attribute) };
    let error = || KvmError::Ioctl { what: "KVM_SET_DEVICE_ATTR", source: std::io::Error::last_os_error() };
    if result == 0 { Ok(()) } else { Err(error()) }
}

fn attribute(offset: *mut u64) -> kvm_device_attr {
    let (group, attr) = (KVM_VCPU_TSC_CTRL, u64::from(KVM_VCPU_TSC_OFFSET));
    kvm_device_attr { flags: 0, group, attr, addr: offset as u64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_reading_counts_whichever_vcpu_made_it() {
        let saved = |readings: &[(u64, u64)]| -> u64 {
            let tsc = |(value, offset): &(u64, u64)| SavedTsc { value: *value, offset: Some(*offset) };
            let offsets: Vec<u64> = readings.iter().map(|(_, offset)| *offset).collect();
            latest_of_host(&readings.iter().map(tsc).collect::<Vec<_>>(), &offsets)
        };
        assert_eq!(saved(&[(1100, 100), (1250, 200)]), 1050);
        assert_eq!(saved(&[(1250, 200), (1100, 100)]), 1050);
        // The host counted 5000 when the first VM was made: its offset is negative.
        let negative = 0_u64.wrapping_sub(5000);
        assert_eq!(saved(&[(7, negative), (9, negative)]), 5009);
        assert_eq!(saved(&[(7, 8), (9, 8)]), 1, "past zero");
    }
}
