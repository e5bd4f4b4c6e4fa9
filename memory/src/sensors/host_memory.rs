//! The host's memory, from `/proc/meminfo` (proc_meminfo(5)): the basis on which policies detect a shortage.

use wideleaf_policies::HostMemory;

use crate::host::{Host, HostError};
use crate::proc_fields::bytes_of;

/// Total memory of the host, and the memory available without swapping. Giant and huge pages are not counted.
///
/// # Errors
/// [`HostError`] if the file cannot be read or lacks one of the two numbers.
pub fn host_memory(host: &dyn Host) -> Result<HostMemory, HostError> {
    let text = host.read_text("/proc/meminfo")?;
    let number = |name: &str| {
        bytes_of(&text, name).ok_or_else(|| HostError {
            what: "parse /proc/meminfo",
            source: std::io::Error::new(std::io::ErrorKind::InvalidData, format!("no {name} in kB")),
        })
    };
    let (total, available) = (number("MemTotal")?, number("MemAvailable")?);
    Ok(HostMemory { total, available, ..HostMemory::default() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::fake_host::FakeHost;
    use wideleaf_policies::units::mib;

    #[test]
    fn total_and_available_are_read_and_a_missing_one_is_an_error() {
        let host = FakeHost::with_runs(Vec::new());
        host.set_text("/proc/meminfo", "MemTotal:       2048 kB\nMemFree:  1 kB\nMemAvailable:   1024 kB\n");
        let memory = host_memory(&host).expect("both numbers are there");
        assert_eq!((memory.total, memory.available), (mib(2), mib(1)));
        host.set_text("/proc/meminfo", "MemTotal:       2048 kB\n");
        assert!(host_memory(&host).expect_err("one is missing").to_string().contains("MemAvailable"));
    }
}
