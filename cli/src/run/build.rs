//! The specification of a run, from its arguments. Contradictions are refused here, before anything of the host is
//! touched; only a snapshot's own description is read.

use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

use wideleaf_control::protocol::SOCKET_PATH;
use wideleaf_kernels::registry::{KernelNames, by_name};
use wideleaf_memory::{BackingConfig, BackingKind};
use wideleaf_policies::policy::RamStart;
use wideleaf_policies::{Bytes, PageSize, PolicyChoice};
use wideleaf_run::failure::Failure;
use wideleaf_run::kernel::{self, Pages, RamRequest};
use wideleaf_run::numa::check_same_cells;
use wideleaf_run::snapshot;
use wideleaf_run::spec::numa::{NumaArg, NumaSpec};
use wideleaf_run::spec::{Console, DeviceSpec, RunSpec, SandboxSpec, Workload};
use wideleaf_run::text::clean;
use wideleaf_vmm::run_loop::OnReset;

use super::args::{BackingArg, OnResetArg, PrefetchArg, RestorePagesArg, RestoreReadsArg, RunArgs};
use crate::output::say;

/// Warning of `--no-sandbox`.
const WITHOUT: &str = "wideleaf: --no-sandbox: a guest that breaks out into this process has all rights of its user: \
    files, network, programs";

/// Checks that options about a snapshot come with one. A file for `--config` may have them in any order, and clap looks
/// at each of its entries alone.
///
/// # Errors
/// [`Failure::Usage`] otherwise.
pub(super) fn check_about_snapshots(args: &RunArgs) -> Result<(), Failure> {
    let is_about_reading =
        args.prefetch != PrefetchArg::Use || args.restore_reads != RestoreReadsArg::Auto || args.restore_rate.is_some();
    let is_about_one = is_about_reading || args.restore_pages != RestorePagesArg::Auto;
    if args.restore.is_some() || !is_about_one {
        return Ok(());
    }
    let options = "--prefetch, --restore-rate, --restore-reads and --restore-pages";
    Err(Failure::Usage(format!("cannot use {options} without a snapshot: name its folder with --restore")))
}

/// Specification of the run with these arguments.
///
/// # Errors
/// [`Failure::Usage`] for arguments that contradict each other.
pub(super) fn spec(args: &RunArgs, policy: PolicyChoice) -> Result<RunSpec, Failure> {
    let Some(name) = args.workload.as_deref() else {
        let what = format!("a built-in kernel ({}) or an image file", KernelNames::ALL);
        let why = "cannot run: no guest is named";
        return Err(Failure::Usage(format!("{why}; name {what}; `wideleaf run --help` has examples")));
    };
    if by_name(name).is_none() && args.native {
        let names = KernelNames::ALL;
        let hint = kernel::meant(name);
        return Err(Failure::Usage(format!(
            "cannot run {name:?} with --native: it is not a built-in kernel ({names}){hint}"
        )));
    }
    let on_reset = on_reset(args, &policy)?;
    let made = policy.make();
    let ram_start = made.ram_start();
    let backing = backing_of(args, ram_start)?.for_first_touch(made.decides_at_first_touch());
    let is_for_giants = made.largest_page() == PageSize::Giant1G;
    let (workload, cmdline, memory) = workload(args, name, &backing)?;
    Ok(RunSpec {
        workload,
        is_native: args.native,
        cmdline,
        initrd: args.initrd.clone(),
        devices: DeviceSpec::from(&args.devices),
        memory,
        vcpus: args.vcpus,
        numa: numa(args)?,
        backing,
        guest_page: args.guest_page,
        policy,
        guarantee: args.guarantee,
        policy_delay: args.policy_delay,
        out_of_reach: args.out_of_reach,
        is_prefaulted: args.prefault || ram_start == RamStart::HugeAndPrefaulted,
        fallback: args.fallback.into(),
        giant_pages_made_max: giant_pages_made_max(args, &backing, is_for_giants)?,
        record: args.record.clone(),
        timeout: args.timeout,
        on_reset,
        console: console(args),
        daemon: daemon(args),
        control_socket: args.control_socket.clone(),
        restore: None,
        prefetch: args.prefetch.into(),
        restore_reads: args.restore_reads.into(),
        restore_bytes_per_second: args.restore_rate.and_then(|rate| NonZeroU64::new(rate.get())),
        restore_pages: args.restore_pages.into(),
        sandbox: sandbox(args)?,
    })
}

/// The workload of this name, its command line, and the size of the guest's RAM.
fn workload(args: &RunArgs, name: &str, backing: &BackingConfig) -> Result<(Workload, String, Bytes), Failure> {
    let Some(kernel) = by_name(name) else {
        if args.class.is_some() {
            return Err(kernel::no_classes(name));
        }
        let memory = args.memory.unwrap_or(kernel::MEMORY_DEFAULT);
        return Ok((Workload::Image(PathBuf::from(name)), args.cmdline.clone(), memory));
    };
    let cmdline = kernel::with_class(kernel, args.class.as_deref(), &args.cmdline)?;
    let memory = kernel::ram_for(kernel, &cmdline, ram_request(args, backing.granule()))?;
    Ok((Workload::Kernel(kernel.name.as_str()), cmdline, memory))
}

/// Specification of the run that continues a saved VM: its own, with what these arguments say about this host.
///
/// # Errors
/// [`Failure`] for a folder that is no snapshot, and for arguments that contradict each other.
pub(super) fn restored_spec(args: &RunArgs, folder: &Path, policy: Option<PolicyChoice>) -> Result<RunSpec, Failure> {
    let saved = snapshot::saved_spec(folder)?;
    let mut devices = DeviceSpec::from(&args.devices);
    if devices.is_empty() {
        devices = saved.devices.clone();
        // Not where the options are only printed.
        if let Some(files) = files_of(&devices).filter(|_| args.effective.is_none()) {
            let hint = "name the devices of a snapshot from elsewhere";
            say(format_args!("wideleaf: the VM gets what its snapshot names: {files}; {hint}"));
        }
    }
    continued_spec(args, RunSpec { devices, restore: Some(folder.to_owned()), ..saved }, policy)
}

/// Files and interfaces of the host that devices are about; `None` if there are none.
fn files_of(devices: &DeviceSpec) -> Option<String> {
    let disks = devices.disks.iter().map(|disk| format!("disk {}", disk.path.display()));
    let taps = devices.cards.iter().map(|card| format!("tap {}", card.tap));
    let sockets = devices.vsock.iter().map(|vsock| format!("socket {}", vsock.socket.display()));
    let all: Vec<String> = disks.chain(taps).chain(sockets).map(|name| clean(&name)).collect();
    (!all.is_empty()).then(|| all.join(", "))
}

/// Specification of the run that continues a VM of another run: that one's, with what these arguments say about this
/// host. A device is a file of this host: the other run names none.
///
/// # Errors
/// [`Failure`] for arguments that contradict each other, and for what cannot move.
pub(super) fn incoming_spec(args: &RunArgs, sent: &RunSpec, policy: Option<PolicyChoice>) -> Result<RunSpec, Failure> {
    let devices = DeviceSpec::from(&args.devices);
    if devices.is_empty() && !sent.devices.is_empty() {
        return Err(Failure::Usage(
            "cannot receive the VM: it has devices; name them with --disk, --net, --vsock, --balloon or --rng"
                .to_owned(),
        ));
    }
    continued_spec(args, RunSpec { devices, restore: None, ..sent.clone() }, policy)
}

/// Checks the arguments of a run that waits for a VM, as far as they say something without it.
///
/// # Errors
/// [`Failure::Usage`] for arguments that contradict each other.
pub(super) fn check_incoming(args: &RunArgs) -> Result<(), Failure> {
    numa(args)?;
    sandbox(args).map(drop)
}

/// Specification of a guest that has run, with what these arguments say about this host.
fn continued_spec(args: &RunArgs, before: RunSpec, policy: Option<PolicyChoice>) -> Result<RunSpec, Failure> {
    if before.is_native {
        let why = "cannot continue a run without a guest: it has no machine's state; start it anew with --native";
        return Err(Failure::Input(why.to_owned()));
    }
    Ok(RunSpec {
        numa: continued_numa(args, &before.numa)?,
        policy: policy.unwrap_or(before.policy),
        guarantee: args.guarantee,
        policy_delay: args.policy_delay,
        out_of_reach: args.out_of_reach.or(before.out_of_reach),
        is_prefaulted: false,
        fallback: args.fallback.into(),
        giant_pages_made_max: 0,
        record: args.record.clone(),
        timeout: args.timeout,
        on_reset: OnReset::Stop,
        console: console(args),
        daemon: daemon(args),
        control_socket: args.control_socket.clone(),
        prefetch: args.prefetch.into(),
        restore_reads: args.restore_reads.into(),
        restore_bytes_per_second: args.restore_rate.and_then(|rate| NonZeroU64::new(rate.get())),
        restore_pages: args.restore_pages.into(),
        sandbox: sandbox(args)?,
        ..before
    })
}

/// NUMA of the guest.
///
/// # Errors
/// [`Failure::Usage`] for cells beside `auto` or `off`.
fn numa(args: &RunArgs) -> Result<NumaSpec, Failure> {
    let cell = |arg: &NumaArg| match arg {
        NumaArg::Cell(cell) => Ok((**cell).clone()),
        NumaArg::Auto | NumaArg::Off => {
            Err(Failure::Usage("cannot use --numa auto or off beside another --numa: leave one out".to_owned()))
        }
    };
    match &args.numa[..] {
        [] | [NumaArg::Auto] => Ok(NumaSpec::Auto),
        [NumaArg::Off] => Ok(NumaSpec::Off),
        cells => cells.iter().map(cell).collect::<Result<_, _>>().map(NumaSpec::Cells),
    }
}

/// NUMA of a guest that has run: its own, or what these arguments say, with the cells that the guest knows.
///
/// # Errors
/// [`Failure::Usage`] for other cells.
fn continued_numa(args: &RunArgs, before: &NumaSpec) -> Result<NumaSpec, Failure> {
    if args.numa.is_empty() {
        return Ok(before.clone());
    }
    let asked = numa(args)?;
    check_same_cells(before, &asked)?;
    Ok(asked)
}

fn console(args: &RunArgs) -> Console {
    if args.console { Console::Bytes } else { Console::Lines }
}

fn daemon(args: &RunArgs) -> Option<PathBuf> {
    (!args.no_daemon).then(|| args.daemon.clone().unwrap_or_else(|| SOCKET_PATH.into()))
}

/// Number of pages of 1 GiB that may be made.
///
/// # Errors
/// [`Failure::Usage`] for a run that uses none.
fn giant_pages_made_max(args: &RunArgs, backing: &BackingConfig, is_for_giants: bool) -> Result<u16, Failure> {
    let uses_some = match backing.kind() {
        BackingKind::Hugetlb => backing.start_page() == PageSize::Giant1G,
        BackingKind::Anon => is_for_giants,
        BackingKind::Memfd => false,
    };
    if args.make_giant_pages > 0 && !uses_some {
        let remedy = "use --policy giant, auto:giant=1 or at-fault:giant=1, or --backing hugetlb --host-page 1g";
        return Err(Failure::Usage(format!("cannot make pages of 1 GiB for a run that uses none; {remedy}")));
    }
    Ok(args.make_giant_pages)
}

/// RAM that the user requests for a kernel.
fn ram_request(args: &RunArgs, host_page: PageSize) -> RamRequest {
    let pages = Pages { host: host_page, guest: (!args.native).then_some(args.guest_page) };
    RamRequest { memory: args.memory, vcpus: args.vcpus, pages }
}

/// The policy if the user names none: `auto`. With hugetlb backing it is `never`: there is nothing to decide, and
/// monitoring would still cost the guest time.
pub(super) fn default_policy(backing: Option<BackingArg>) -> PolicyChoice {
    let name = if backing == Some(BackingArg::Hugetlb) { "never" } else { "auto" };
    PolicyChoice::parse(name).expect("both are in the list")
}

/// The backing that the user chose, completed by the policy's needs.
fn backing_of(args: &RunArgs, ram_start: RamStart) -> Result<BackingConfig, Failure> {
    let chosen = args.backing.map(BackingKind::from);
    if ram_start == RamStart::OnReservableFrames {
        let is_fit =
            matches!((chosen, args.host_page), (None | Some(BackingKind::Memfd), None | Some(PageSize::Base4K)));
        return is_fit.then(BackingConfig::reservable).ok_or_else(|| {
            let remedy = "use --backing memfd --host-page 4k, or omit both";
            Failure::Usage(format!(
                "cannot reserve frames with this RAM: the policy needs memfd RAM on 4k pages; {remedy}"
            ))
        });
    }
    let kind = chosen.unwrap_or(BackingKind::Anon);
    let start_page = args.host_page.unwrap_or(match (kind, ram_start) {
        (BackingKind::Hugetlb, _) | (_, RamStart::HugeAndPrefaulted) => PageSize::Huge2M,
        (BackingKind::Anon | BackingKind::Memfd, _) => PageSize::Base4K,
    });
    BackingConfig::new(kind, start_page).map_err(|error| Failure::Usage(error.to_string()))
}

/// Action at a reset, from the arguments.
///
/// # Errors
/// [`Failure::Usage`] for arguments that apply to one boot only.
fn on_reset(args: &RunArgs, policy: &PolicyChoice) -> Result<OnReset, Failure> {
    if args.on_reset == OnResetArg::Stop {
        return Ok(OnReset::Stop);
    }
    if args.record.is_some() {
        return Err(Failure::Usage(
            "cannot use --on-reset restart with --record: a recording is of one boot; omit --record, or use \
            --on-reset stop"
                .into(),
        ));
    }
    if policy.make().answers_faults() {
        return Err(Failure::Usage(format!(
            "cannot use --on-reset restart with --policy {policy}: it decides at the first touch of a page, and only \
            once; use another policy, or --on-reset stop"
        )));
    }
    Ok(OnReset::Restart)
}

/// Settings from the arguments; `None` without a sandbox.
///
/// # Errors
/// [`Failure::Usage`] if there is no such user.
fn sandbox(args: &RunArgs) -> Result<Option<SandboxSpec>, Failure> {
    if args.native {
        return Ok(None);
    }
    if args.no_sandbox {
        say(WITHOUT);
        return Ok(None);
    }
    let user = args.user.as_deref().map(str::parse).transpose();
    let user = user.map_err(|error: wideleaf_vmm::sandbox::user::UserError| {
        Failure::Usage(format!("cannot use --user: {error}"))
    })?;
    let must_be_complete = args.require_sandbox;
    Ok(Some(SandboxSpec { user, jail: args.jail.clone(), must_be_complete, output_folder: None }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use wideleaf_policies::Bytes;
    use wideleaf_policies::units::{gib, mib};
    use wideleaf_run::kernel::{MEMORY_STEP, ram_for, with_class};

    use crate::args::{Cli, Command};

    fn run_args(arguments: &[&str]) -> Box<RunArgs> {
        match Cli::parse_from([&["wideleaf", "run"], arguments].concat()).command {
            Command::Run(args) => args,
            _ => panic!("it is `run`"),
        }
    }

    /// RAM of a run with these arguments, of which the first names a kernel.
    fn ram(arguments: &[&str]) -> Result<Bytes, String> {
        let args = run_args(arguments);
        let kernel = by_name(arguments[0]).expect("a kernel is named first");
        let cmdline = with_class(kernel, args.class.as_deref(), &args.cmdline).map_err(|error| error.to_string())?;
        let host_page = args.host_page.unwrap_or(PageSize::Base4K);
        ram_for(kernel, &cmdline, ram_request(&args, host_page)).map_err(|error| error.to_string())
    }

    #[test]
    fn a_run_without_a_guest_is_not_continued() {
        let base = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("anonymous base pages exist");
        let before = RunSpec { is_native: true, ..RunSpec::of_kernel("gups", "", mib(64), base) };
        let args = run_args(&["--restore=saved"]);
        let why = continued_spec(&args, before.clone(), None).expect_err("it has no guest").to_string();
        assert!(why.contains("cannot continue a run without a guest"), "{why}");
        assert!(continued_spec(&args, RunSpec { is_native: false, ..before }, None).is_ok());
    }

    #[test]
    fn the_part_of_the_time_out_of_reach_is_that_of_the_options_or_of_the_run_before() {
        let base = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("anonymous base pages exist");
        let of_options = |arguments: &[&str]| {
            let policy = default_policy(None);
            spec(&run_args(arguments), policy).expect("they make sense").out_of_reach.map(|part| part.to_string())
        };
        assert_eq!(of_options(&["gups", "--out-of-reach=12.5%"]).as_deref(), Some("12.50%"));
        assert_eq!(of_options(&["gups"]), None);
        let tenth = "10%".parse().ok();
        let before = RunSpec { out_of_reach: tenth, ..RunSpec::of_kernel("gups", "", mib(64), base) };
        let continued = |arguments: &[&str]| {
            continued_spec(&run_args(arguments), before.clone(), None).expect("they make sense").out_of_reach
        };
        assert_eq!(continued(&["--restore=saved"]), tenth);
        assert_eq!(continued(&["--restore=saved", "--out-of-reach=1%"]), "1%".parse().ok());
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
