//! The built-in kernel of a run, from the table of kernels: checks that the kernel and its class exist, and
//! computes the RAM that it needs. Impossible runs are refused here, before anything exists.
//!
//! ```text
//!   KERNEL ─▶ by_name ─▶ with_class ─▶ memory_needed ─▶ ram_for ─▶ guest RAM: as requested, or enough
//! ```

use std::io;
use std::path::Path;

use wideleaf_guest_image::IMAGE;
use wideleaf_kernels::npb::classes::Class;
use wideleaf_kernels::parameters::Parameters;
use wideleaf_kernels::registry::{KernelNames, MemoryNeed};
use wideleaf_kernels::{KERNELS, Kernel, KernelError};
use wideleaf_memory::input_file::InputError;
use wideleaf_policies::units::{gib, mib};
use wideleaf_policies::{Bytes, PageSize};
use wideleaf_protocol::CommandLine;
use wideleaf_protocol::arguments::KEY_KERNEL;
use wideleaf_vmm::HostLimits;
use wideleaf_vmm::boot::free_ram::{free_with_ram, ram_with_free};
use wideleaf_vmm::config;

use crate::failure::Failure;
use crate::suggest::did_you_mean;

/// RAM of a run that needs no more, or that takes all memory.
pub const MEMORY_DEFAULT: Bytes = gib(1);

/// Step of an automatic RAM size: a memslot, and a readable number.
pub const MEMORY_STEP: Bytes = mib(64);

/// The letters of a kernel's classes.
pub fn letters(kernel: &Kernel) -> String {
    let letters: Vec<_> = kernel.classes.iter().map(|class| class.letter()).collect();
    letters.join(", ")
}

/// Error of `--class` for a workload without classes.
pub fn no_classes(name: &str) -> Failure {
    let those = KernelNames::WITH_CLASSES;
    Failure::Usage(format!("cannot use --class: {name} has no classes; omit --class (kernels with classes: {those})"))
}

/// The kernel's command line with the class of `--class`.
///
/// # Errors
/// [`Failure::Usage`] if the kernel has no such class, or the command line names one too.
pub fn with_class(kernel: &Kernel, class: Option<&str>, cmdline: &str) -> Result<String, Failure> {
    let Some(letter) = class else { return Ok(cmdline.to_owned()) };
    if kernel.classes.is_empty() {
        return Err(no_classes(kernel.name.as_str()));
    }
    let class = Class::from_letter(letter).filter(|class| kernel.classes.contains(class)).ok_or_else(|| {
        let there = letters(kernel);
        Failure::Usage(format!("cannot use --class: {} has no class {letter:?}; it has {there}", kernel.name))
    })?;
    let key = Class::PARAMETER.name;
    if cmdline.split_ascii_whitespace().any(|word| word.split('=').next() == Some(key)) {
        return Err(Failure::Usage(format!("cannot use --class together with {key}= in --cmdline: omit one of them")));
    }
    Ok(format!("{key}={class} {cmdline}").trim_end().to_owned())
}

/// Suffix of an error with the kernel that a mistyped name probably means.
pub fn meant(name: &str) -> String {
    did_you_mean(name, KERNELS.iter().map(|kernel| kernel.name.as_str()))
}

/// Error for a workload that is neither a kernel nor a readable image. A name with a `/` is a path.
pub fn no_image(path: &Path, error: &InputError) -> Failure {
    let shown = path.display();
    let is_absent = matches!(error, InputError::Io(error) if error.kind() == io::ErrorKind::NotFound);
    if !is_absent || path.components().count() > 1 || path.is_absolute() {
        return Failure::Input(format!("cannot read the image {shown}: {error}"));
    }
    let hint = meant(&path.to_string_lossy());
    let names = KernelNames::ALL;
    Failure::Input(format!("cannot run {shown:?}: it is neither a built-in kernel ({names}) nor a file{hint}"))
}

/// The whole line that starts a kernel with these parameters.
pub fn line(name: &str, cmdline: &str) -> String {
    format!("{KEY_KERNEL}={name} {cmdline}").trim_end().to_owned()
}

/// Class of a run with this command line, given or by default; `None` if the kernel has none.
pub fn class_of(kernel: &Kernel, cmdline: &str) -> Option<Class> {
    let line = line(kernel.name.as_str(), cmdline);
    let parameters = Parameters::new(CommandLine::new(&line).ok()?, kernel.parameters).ok()?;
    (!kernel.classes.is_empty()).then(|| Class::from_parameters(&parameters).ok())?
}

/// Memory that a run with this command line needs.
///
/// # Errors
/// [`Failure::Usage`] if its parameters, or this number of vCPUs, are invalid.
pub fn memory_needed(kernel: &Kernel, cmdline: &str, vcpus: u8) -> Result<MemoryNeed, Failure> {
    let line = line(kernel.name.as_str(), cmdline);
    kernel.memory_for(&line, usize::from(vcpus)).map_err(|error| {
        Failure::Usage(match error {
            KernelError::TooManyVcpus { most, .. } => {
                format!("cannot use --vcpus {vcpus}: {} can use at most {most}", kernel.name)
            }
            error => format!("--cmdline: {error}"),
        })
    })
}

/// Pages that RAM must be a multiple of.
#[derive(Clone, Copy, Debug)]
pub struct Pages {
    /// Host pages that back RAM.
    pub host: PageSize,
    /// Pages of the guest's tables; `None` for a native run.
    pub guest: Option<PageSize>,
}

impl Pages {
    fn largest(self) -> PageSize {
        self.guest.map_or(self.host, |page| page.max(self.host))
    }
}

/// RAM that a user requests for a kernel.
#[derive(Clone, Copy, Debug)]
pub struct RamRequest {
    /// Requested size; `None`: enough for the kernel.
    pub memory: Option<Bytes>,
    /// Number of vCPUs or threads.
    pub vcpus: u8,
    /// Pages that RAM must be a multiple of.
    pub pages: Pages,
}

/// The least RAM, in whole pages, that leaves the kernel this amount: in a guest, beside the image, its tables and
/// the hole.
///
/// # Errors
/// [`Failure::Usage`] if no machine has that amount.
pub fn least_ram(needed: Bytes, pages: Pages) -> Result<Bytes, Failure> {
    let ram = match pages.guest {
        None => needed.checked_round_up(PageSize::Huge2M),
        Some(page) => ram_with_free(IMAGE, page, needed).map_err(|error| Failure::Input(error.to_string()))?,
    };
    round_up(ram.ok_or_else(|| more_than_any_machine_has(needed))?, pages.largest().bytes())
}

/// RAM for a run: as requested if that suffices; otherwise the necessary amount, at least [`MEMORY_DEFAULT`].
///
/// # Errors
/// [`Failure::Usage`] if the request is invalid, or too small.
pub fn ram_for(kernel: &Kernel, cmdline: &str, request: RamRequest) -> Result<Bytes, Failure> {
    let RamRequest { memory: requested, vcpus, pages } = request;
    if let Some(memory) = requested {
        let both = [Some((pages.host, "host")), pages.guest.map(|page| (page, "guest"))];
        let both: Vec<_> = both.into_iter().flatten().collect();
        config::check_memory(memory, &both, &HostLimits::none())?;
    }
    let needed = match memory_needed(kernel, cmdline, vcpus)? {
        MemoryNeed::Bytes(needed) => Bytes::new(needed),
        MemoryNeed::AllThereIs => return Ok(requested.unwrap_or(MEMORY_DEFAULT)),
    };
    let enough = least_ram(needed, pages)?;
    match requested {
        None => round_up(enough.max(MEMORY_DEFAULT), MEMORY_STEP.max(pages.largest().bytes())),
        Some(memory) if free_of(memory, pages.guest)? >= needed => Ok(memory),
        Some(memory) => {
            // RAM beyond the hole at 3 GiB can leave less in one piece than RAM that ends there.
            let at_least = if enough > memory { "at least " } else { "" };
            let (name, enough_mib) = (kernel.name, enough.get() >> 20);
            let note = if pages.guest.is_none() { "" } else { " in one piece, and the guest needs some for itself" };
            Err(Failure::Usage(format!(
                "cannot run with --memory {memory}: {name} needs {needed}{note}; use {at_least}--memory \
                {enough_mib}M, or omit it"
            )))
        }
    }
}

/// Memory that this amount of RAM leaves the kernel in one piece.
fn free_of(ram: Bytes, guest_page: Option<PageSize>) -> Result<Bytes, Failure> {
    let Some(page) = guest_page else { return Ok(ram) };
    let free = free_with_ram(IMAGE, page, ram).map_err(|error| Failure::Input(error.to_string()))?;
    free.ok_or_else(|| more_than_any_machine_has(ram))
}

fn round_up(bytes: Bytes, step: Bytes) -> Result<Bytes, Failure> {
    let rounded = bytes.get().checked_next_multiple_of(step.get()).map(Bytes::new);
    rounded.ok_or_else(|| more_than_any_machine_has(bytes))
}

fn more_than_any_machine_has(bytes: Bytes) -> Failure {
    Failure::Usage(format!("cannot use {bytes} of memory: no machine has that amount"))
}
