//! `wideleaf run`: from arguments to a specification, and from its report to a result.
//!
//! 1. arguments and output file are checked: nothing on the host has changed yet
//! 2. the run (`wideleaf-run`), with this terminal as its front end
//! 3. the report, and the exit code

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use wideleaf_kernels::registry::by_name;
use wideleaf_policies::policy::POLICIES;
use wideleaf_policies::{PageSize, PolicyChoice};
use wideleaf_run::engine::{self, Finished};
use wideleaf_run::failure::Failure;
use wideleaf_run::guardian::cgroup::HeldCgroup;
use wideleaf_run::interrupts::Interrupts;
use wideleaf_run::migration::{Address, Incoming};
use wideleaf_run::outcome::verdict;
use wideleaf_run::output_file::{is_standard_output, refuse_standard_output};
use wideleaf_run::report::RunReport;
use wideleaf_run::same_file::refuse_one_file_for_two;
use wideleaf_run::spec::{DeviceSpec, RunSpec};
use wideleaf_snapshot::{MACHINE_FILE, MEMORY_FILE};
use wideleaf_vmm::sandbox::before_first_thread;

use self::args::{PolicyOrHelp, RunArgs};
use self::front_end::TerminalFrontEnd;
use crate::options::FormatArg;
use crate::output::{Output, end_of_both, print, say};
use crate::report::headline::headline;
use crate::table::prose_table;
use crate::{report, stderr};

pub mod args;
mod build;
pub mod config_file;
mod console;
pub mod devices;
pub mod front_end;

/// Runs the subcommand `run`.
///
/// # Errors
/// [`Failure`]; nothing is left behind.
pub fn main(args: RunArgs, process_start: Instant) -> Result<(), Failure> {
    // The process enters its sandbox later. Before that it starts threads, for signals and for messages.
    before_first_thread();
    build::check_about_snapshots(&args)?;
    let policy = match &args.policy {
        Some(PolicyOrHelp::Help) => return list_policies(),
        Some(PolicyOrHelp::Use(policy)) => Some(policy.choice("--policy")?),
        None => None,
    };
    if let Some(address) = &args.incoming {
        return match &args.effective {
            // The VM itself is known once it comes.
            Some(text) => build::check_incoming(&args).and_then(|()| print(text)),
            None => receive(&args, address, policy, process_start),
        };
    }
    let spec = match &args.restore {
        Some(folder) => build::restored_spec(&args, folder, policy)?,
        None => build::spec(&args, policy.unwrap_or_else(|| build::default_policy(args.backing)))?,
    };
    if let Some(text) = &args.effective {
        return print(text);
    }
    check_outputs(&args, &spec.devices)?;
    // In this order: once the output's temporary file exists, a signal no longer ends this process without removing it.
    let interrupts = Interrupts::install_with(stderr::interrupted)?;
    run(&args, spec, None, &interrupts, process_start)
}

/// Waits for a VM, and runs it.
fn receive(
    args: &RunArgs,
    address: &Address,
    policy: Option<PolicyChoice>,
    process_start: Instant,
) -> Result<(), Failure> {
    check_outputs(args, &DeviceSpec::from(&args.devices))?;
    if address.takes_standard_output() && (args.console || args.output.is_none()) {
        return Err(Failure::Usage(
            "cannot use --incoming stdio: it takes standard input and output; say where the result goes with \
             --output, and leave --console out"
                .into(),
        ));
    }
    // The socket's file must be removed if a signal comes.
    let interrupts = Interrupts::install_with(stderr::interrupted)?;
    let on_wait = |place: &str| say(format_args!("wideleaf: waiting for a VM at {place}"));
    let incoming = Arc::new(Incoming::wait(address, &interrupts, &on_wait)?);
    let spec = build::incoming_spec(args, incoming.spec(), policy);
    let spec = spec.inspect_err(|why| incoming.refuse(&why.to_string()))?;
    run(args, spec, Some(&incoming), &interrupts, process_start)
}

/// Checks the places of results: none replaces a file that the run reads, or a disk of its guest.
fn check_outputs(args: &RunArgs, devices: &DeviceSpec) -> Result<(), Failure> {
    let image = args.workload.as_deref().filter(|name| by_name(name).is_none()).map(Path::new);
    let named = [("--config", args.config.as_deref()), ("the image", image), ("--initrd", args.initrd.as_deref())];
    let saved = args.restore.iter().flat_map(|folder| [MACHINE_FILE, MEMORY_FILE].map(|name| folder.join(name)));
    let saved: Vec<_> = saved.collect();
    let read = named.into_iter().filter_map(|(option, path)| Some((option, path?)));
    let read = read.chain(saved.iter().map(|path| ("--restore", path.as_path())));
    let read = read.chain(devices.disks.iter().map(|disk| ("--disk", disk.path.as_path())));
    let written = [("--record", args.record.as_deref()), ("--output", args.output.as_deref())];
    refuse_one_file_for_two(read, written)?;
    let output = args.output.as_deref().filter(|path| !is_standard_output(path));
    args.record.as_deref().map_or(Ok(()), |path| refuse_standard_output("--record", path))?;
    if args.console && output.is_none() && args.format == FormatArg::Json {
        return Err(Failure::Usage(
            "cannot print JSON: --console gives standard output to the guest; say where it goes with --output".into(),
        ));
    }
    Ok(())
}

fn run(
    args: &RunArgs,
    mut spec: RunSpec,
    incoming: Option<&Arc<Incoming>>,
    interrupts: &Interrupts,
    process_start: Instant,
) -> Result<(), Failure> {
    let output = args.output.as_deref().filter(|path| !is_standard_output(path));
    stderr::queue();
    let output = match (args.console, output) {
        (true, None) => None,
        (_, path) => Some(Output::open(args.format, path)?),
    };
    if let (Some(sandbox), Some(output)) = (&mut spec.sandbox, &output) {
        sandbox.output_folder = output.folder().map(Path::to_owned);
    }
    let cgroup = args.cgroup.as_deref().map(HeldCgroup::join).transpose()?;
    let counting = args.count_walks.then(|| TerminalFrontEnd::counting_walks(args.native)).transpose();
    let front = counting.unwrap_or_else(|why| {
        say(format_args!("wideleaf: page walks are not counted: {why}"));
        None
    });
    let front = Arc::new(front.unwrap_or_default());
    let finished = match incoming {
        None => engine::run(&spec, front, interrupts, process_start),
        Some(incoming) => engine::run_incoming(&spec, incoming, front, interrupts, process_start),
    };
    let Finished { mut report, end } = finished?;
    report.headline = headline(&report, spec.policy.make().largest_page() == PageSize::Giant1G);
    drop(cgroup);
    interrupts.end_at_the_next();
    let to_table = |report: &RunReport| report::to_table(report, args.verbose);
    let written = match output {
        Some(output) => output.write(&report, to_table),
        None => {
            say(to_table(&report));
            Ok(())
        }
    };
    let kept = written.and_then(|()| check_recording(&spec, &report));
    let verdict = end.and_then(|()| verdict(&report.outcome, report.verification.as_ref(), &report.results));
    end_of_both("wideleaf", verdict, kept)
}

/// Checks that the recording is complete in its file.
fn check_recording(spec: &RunSpec, report: &RunReport) -> Result<(), Failure> {
    let (Some(path), Some(recording)) = (&spec.record, &report.manager.recording) else {
        return Ok(());
    };
    match &recording.error {
        None => Ok(()),
        Some(error) => Err(Failure::Output(format!(
            "cannot write --record {}: {error}; the last {} of {} frames are missing",
            path.display(),
            recording.frames_lost,
            recording.frames + recording.frames_lost
        ))),
    }
}

/// Prints the list of `--policy help`.
///
/// # Errors
/// [`Failure::Output`] if it could not be written.
pub fn list_policies() -> Result<(), Failure> {
    let mut policies = prose_table(&["policy", "what it does"]);
    let mut parameters = prose_table(&["policy", "parameter", "default", "unit", "meaning"]);
    for policy in POLICIES {
        policies.add_row([policy.name, policy.summary]);
        for info in policy.parameters {
            parameters.add_row([policy.name, info.name, &info.default_text(), info.unit, info.meaning]);
        }
    }
    let how = "To set parameters: --policy thp:max_ptes_none=64,scan_sleep_ms=1000, or from a file:\n\
        --policy schemes:rules=@FILE";
    print(&format!("{policies}\n\n{how}\n{parameters}\n"))
}
