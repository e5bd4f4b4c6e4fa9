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
use wideleaf_vmm::boot::room::{free_with_ram, ram_with_free};
use wideleaf_vmm::config;

use crate::args::RunArgs;
use crate::failure::Failure;
use crate::suggest::did_you_mean;

/// RAM of a run that needs no more, or that takes all memory.
pub const MEMORY_DEFAULT: Bytes = gib(1);

/// Step of an automatic RAM size: a memslot, and a readable number.
const MEMORY_STEP: Bytes = mib(64);

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
        Failure::Usage(format!("{} has no class {letter:?}; it has {there}", kernel.name))
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
pub fn ram_for(kernel: &Kernel, cmdline: &str, args: &RunArgs, host_page: PageSize) -> Result<Bytes, Failure> {
    let pages = Pages { host: host_page, guest: (!args.native).then_some(args.guest_page) };
    if let Some(memory) = args.memory {
        let both = [Some((pages.host, "host")), pages.guest.map(|page| (page, "guest"))];
        let both: Vec<_> = both.into_iter().flatten().collect();
        config::check_memory(memory, &both, &HostLimits::none()).map_err(super::from_config_error)?;
    }
    let needed = match memory_needed(kernel, cmdline, args.vcpus)? {
        MemoryNeed::Bytes(needed) => Bytes::new(needed),
        MemoryNeed::AllThereIs => return Ok(args.memory.unwrap_or(MEMORY_DEFAULT)),
    };
    let enough = least_ram(needed, pages)?;
    match args.memory {
        None => round_up(enough.max(MEMORY_DEFAULT), MEMORY_STEP.max(pages.largest().bytes())),
        Some(memory) if free_of(memory, pages.guest)? >= needed => Ok(memory),
        Some(memory) => {
            // RAM beyond the hole at 3 GiB can leave less in one piece than RAM that ends there.
            let at_least = if enough > memory { "at least " } else { "" };
            let (name, enough_mib) = (kernel.name, enough.get() >> 20);
            let whose = if args.native { "" } else { " in one piece, and the guest needs some for itself" };
            Err(Failure::Usage(format!(
                "cannot run with --memory {memory}: {name} needs {needed}{whose}; use {at_least}--memory \
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use clap::Parser;
    use wideleaf_kernels::registry::by_name;

    /// RAM of a run with these arguments, of which the first names a kernel.
    fn ram(arguments: &[&str]) -> Result<Bytes, String> {
        let Command::Run(args) = Cli::parse_from([&["wideleaf", "run"], arguments].concat()).command else {
            panic!("it is `run`")
        };
        let kernel = by_name(arguments[0]).expect("a kernel is named first");
        let cmdline = with_class(kernel, args.class.as_deref(), &args.cmdline).map_err(|error| error.to_string())?;
        let host_page = args.host_page.unwrap_or(PageSize::Base4K);
        ram_for(kernel, &cmdline, &args, host_page).map_err(|error| error.to_string())
    }

    #[test]
    fn automatic_ram_is_enough_for_the_kernel_and_never_less_than_the_default() {
        let cases: [(&[&str], Bytes); 6] = [
            (&["gups", "--native"], gib(1)),
            (&["pattern"], gib(1)),
            (&["gups", "--native", "--cmdline=log2_words=27"], gib(1)),
            // The image and its page tables on top.
            (&["gups", "--cmdline=log2_words=27"], gib(1) + MEMORY_STEP),
            (&["gups", "--native", "--cmdline=log2_words=27 sparse=2M"], gib(1) + MEMORY_STEP),
            (&["gups", "--cmdline=log2_words=27", "--guest-page=1g"], gib(2)),
        ];
        for (arguments, expected) in cases {
            assert_eq!(ram(arguments), Ok(expected), "{arguments:?}");
        }
        let npb_is = ram(&["npb.is", "--class=C", "--native"]).expect("it has a class C");
        assert!(npb_is > gib(1) && npb_is < gib(2), "1056 MiB are needed: {npb_is}");
    }

    #[test]
    fn given_ram_is_accepted_if_it_is_enough_to_the_byte() {
        assert_eq!(ram(&["gups", "--native", "--memory=256M"]), Ok(mib(256)));
        let short = ram(&["gups", "--native", "--memory=254M"]).expect_err("the table alone has 256 MiB");
        assert_eq!(
            short,
            "cannot run with --memory 254 MiB: gups needs 256 MiB; use at least --memory 256M, or omit it"
        );
        let short = ram(&["gups", "--memory=256M"]).expect_err("the guest needs some for itself");
        let (_, remedy) = short.split_once("use at least --memory ").expect("it has a remedy");
        let enough = remedy.split_once(',').map_or(remedy, |(size, _)| size);
        assert!(ram(&["gups", &format!("--memory={enough}")]).is_ok(), "{short}");
    }

    #[test]
    fn more_ram_than_advised_is_refused_if_the_hole_leaves_less_of_it() {
        let with = |sparse_mib: u64, memory: &[&str]| {
            let cmdline = format!("--cmdline=log2_words=20 sparse={sparse_mib}M");
            ram(&[&["gups", &cmdline, "--guest-page=4k"], memory].concat())
        };
        // The most that fits below the hole: the last window that the tables for a further gibibyte would take is
        // in use.
        let most =
            (0..=3072).rev().step_by(2).find(|sparse| with(*sparse, &[]) == Ok(gib(3))).expect("3 GiB hold some");
        assert_eq!(with(most, &["--memory=3G"]), Ok(gib(3)));
        let refused = with(most, &["--memory=4G"]).expect_err("its pieces are shorter");
        assert!(refused.contains("in one piece") && refused.contains("; use --memory 3072M, or"), "{refused}");
    }

    #[test]
    fn impossible_ram_is_refused_for_that_reason_first() {
        let cut = ram(&["gups", "--native", "--memory=65M", "--host-page=2m"]).expect_err("half a page is left");
        assert!(cut.starts_with("65 MiB of RAM is not a whole number of 2m host pages"), "{cut}");
        let none = ram(&["gups", "--native", "--cmdline=log2_words=40 sparse=1024G"]);
        assert_eq!(none, Ok(Bytes::new((8 + 1) << 40)), "whether the host has it is another question");
    }
}
