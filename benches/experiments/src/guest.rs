//! A guest of the built-in image, and its command lines: the same kernel, parameters and memory for `wideleaf run` and
//! for QEMU.

use serde::{Deserialize, Serialize};

use crate::command_line::typed;

/// Name of the QEMU program.
pub const QEMU: &str = "qemu-system-x86_64";
/// CPU model for QEMU. QEMU 7.2 reads `ARCH_CAPABILITIES` from KVM, and on some AMD hosts it then may not set it.
const QEMU_CPU: &str = "host,arch-capabilities=off";
/// Path of the image in a command that is shown to the user.
const IMAGE_SHOWN: &str = "guest.elf";

/// A guest of the built-in image.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct Guest {
    /// Name of the kernel, as `wideleaf run` takes it.
    pub kernel: String,
    /// Parameters of the kernel, including the class.
    pub cmdline: String,
    /// RAM of the guest in MiB.
    pub memory_mib: u64,
    /// Number of processors.
    pub vcpus: u8,
}

/// Backing of a QEMU guest's RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum QemuRam {
    /// `memory-backend-ram` with QEMU's advice MADV_HUGEPAGE: huge pages at first touch and by khugepaged.
    Thp,
    /// `memory-backend-memfd` on 2 MiB pages of the hugetlb pool, all allocated before the guest runs.
    Hugetlb,
}

impl QemuRam {
    fn object(self) -> &'static str {
        match self {
            QemuRam::Thp => "memory-backend-ram",
            QemuRam::Hugetlb => "memory-backend-memfd,hugetlb=on,hugetlbsize=2M,prealloc=on",
        }
    }
}

impl Guest {
    /// A guest with one processor.
    pub fn new(kernel: &str, cmdline: &str, memory_mib: u64) -> Guest {
        Guest { kernel: kernel.into(), cmdline: cmdline.into(), memory_mib, vcpus: 1 }
    }

    /// Arguments for `wideleaf run`.
    pub fn arguments(&self) -> Vec<String> {
        let (memory, vcpus) = (format!("{}M", self.memory_mib), self.vcpus.to_string());
        let vcpus = if self.vcpus == 1 { vec![] } else { vec!["--vcpus", &vcpus] };
        let cmdline = if self.cmdline.is_empty() { vec![] } else { vec!["--cmdline", &self.cmdline] };
        let all = [vec![&*self.kernel, "--memory", &memory], vcpus, cmdline].concat();
        all.into_iter().map(str::to_owned).collect()
    }

    /// Arguments for QEMU.
    pub fn qemu_arguments(&self, ram: QemuRam, image: &str) -> Vec<String> {
        let Guest { kernel, cmdline, memory_mib, vcpus } = self;
        let (memory, vcpus) = (format!("{memory_mib}M"), vcpus.to_string());
        let object = format!("{},id=ram0,size={memory}", ram.object());
        let line = format!("kernel={kernel} guest_pages=2m {cmdline}");
        let machine = ["-M", "microvm,memory-backend=ram0", "-accel", "kvm", "-cpu", QEMU_CPU, "-m", &memory];
        let ram = ["-object", &object, "-smp", &vcpus, "-nodefaults", "-no-user-config", "-no-reboot"];
        let console = ["-display", "none", "-serial", "stdio", "-device", "isa-debug-exit,iobase=0xf4,iosize=4"];
        let what = ["-append", line.trim_end(), "-kernel", image];
        [&machine[..], &ram, &console, &what].concat().into_iter().map(str::to_owned).collect()
    }

    /// QEMU command line as a user would type it.
    pub(crate) fn qemu_command(&self, ram: QemuRam) -> String {
        format!("{QEMU} {}", typed(&self.qemu_arguments(ram, IMAGE_SHOWN)))
    }

    /// Number of 2 MiB pages in the guest's RAM.
    pub fn pages_2m(&self) -> u64 {
        self.memory_mib.div_ceil(2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qemu_has_the_same_kernel_parameters_and_memory() {
        let guest = Guest::new("npb.cg", "class=A", 128);
        let command = guest.qemu_command(QemuRam::Hugetlb);
        for part in [
            "-append 'kernel=npb.cg guest_pages=2m class=A'",
            "-object memory-backend-memfd,hugetlb=on,hugetlbsize=2M,prealloc=on,id=ram0,size=128M",
            "-kernel guest.elf",
        ] {
            assert!(command.contains(part), "no {part} in {command}");
        }
        assert_eq!(guest.arguments().join(" "), "npb.cg --memory 128M --cmdline class=A");
    }
}
