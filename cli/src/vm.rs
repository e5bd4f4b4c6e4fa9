//! `wideleaf vm SOCKET …`: sends one request to the VM with that control socket, and shows the answer.

use std::fmt::Write as _;
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use comfy_table::Cell;
use wideleaf_control::vm::{
    DeviceView, DriverView, PastSavesView, PhaseView, RemappedView, RestoringView, SavingView, StopHow, VcpuView,
    VmAnswer, VmRequest, VmState, VmStatistics, VmStatus, ask,
};
use wideleaf_policies::Bytes;
use wideleaf_run::failure::Failure;
use wideleaf_run::text::clean;

use crate::guests::settings::PolicyOrOff;
use crate::guests::{map_text, tables};
use crate::options::FormatArg;
use crate::output::Output;
use crate::report::moved::{before_pause, paid};
use crate::table::{number, table};

mod migrate;
mod progress;
mod recover;
pub mod snapshot;

const EXAMPLES: &str = "\
Examples:
  A VM with a control socket, and some requests to it:
    wideleaf run pattern --cmdline 'seconds=600' --control-socket /run/vm.sock &
    wideleaf vm /run/vm.sock status
    wideleaf vm /run/vm.sock pause
    wideleaf vm /run/vm.sock resume
    wideleaf vm /run/vm.sock set-policy off
    wideleaf vm /run/vm.sock set-policy auto:horizon_s=120

  A VM with a --balloon: let it take 2 GiB of the guest's RAM, and see the guest's statistics:
    wideleaf vm /run/vm.sock balloon 2G
    wideleaf vm /run/vm.sock statistics

  The backing of its memory and the work of its manager, for programs:
    wideleaf vm /run/vm.sock statistics --format json

  Every window of its memory, and why not all of them are large:
    wideleaf vm /run/vm.sock windows
    wideleaf vm /run/vm.sock explain

  Save it while it runs, and continue it from there, here or on another host with a CPU of the
  same vendor that has all features that the guest sees:
    wideleaf vm /run/vm.sock snapshot /srv/snapshots/monday
    wideleaf run --restore /srv/snapshots/monday

  Move it to another run while it works, here or on another host with such a CPU:
    wideleaf run --incoming tcp:0.0.0.0:4444
    wideleaf vm /run/vm.sock migrate tcp:host:4444

  Stop it: ask its guest to shut down, or stop it at once:
    wideleaf vm /run/vm.sock stop --how ask
    wideleaf vm /run/vm.sock stop --how kill";

/// Arguments of `wideleaf vm`.
#[derive(Args, Debug)]
#[command(after_long_help = EXAMPLES)]
pub struct VmSocketArgs {
    /// Socket that --control-socket of its `wideleaf run` named
    #[arg(value_name = "SOCKET")]
    socket: PathBuf,

    /// Request to the VM
    #[command(subcommand)]
    command: VmCommand,

    /// Format of the output
    #[arg(long, value_enum, default_value = "table", global = true)]
    format: FormatArg,
}

#[derive(Debug, Subcommand)]
enum VmCommand {
    #[command(flatten)]
    Ask(Question),
    /// Save it to a folder while it runs, for `wideleaf run --restore`
    Snapshot(snapshot::SnapshotArgs),
    /// Move it to a `wideleaf run --incoming` while it runs, here or on another host, with a CPU of the same vendor
    /// that has all features that the guest sees; this run then ends. Whatever fails before, it goes on here
    Migrate(migrate::MigrateArgs),
    /// Continue a migration that lost its connection while pages followed the guest: first at the target with
    /// --incoming, then at the source
    Recover(recover::RecoverArgs),
}

/// A request without files.
#[derive(Debug, Subcommand)]
enum Question {
    /// Pause its vCPUs until it is resumed; memory, devices and connections stay
    Pause,
    /// Resume its vCPUs
    Resume,
    /// Stop the VM
    Stop {
        /// Way to stop it
        #[arg(long, value_enum)]
        how: StopArg,
    },
    /// Reset it, as with a reset button: it boots again, and data that the guest has not written to its disks are
    /// lost. For a run with --on-reset restart
    Reset,
    /// Show its state, and the devices for which the guest has drivers
    Status,
    /// Show the backing of its memory, its manager's work, and its devices' counters
    Statistics,
    /// Show what backs and maps every window (2 MiB) of its memory, its heat, its state, and why it is not large
    Windows,
    /// Show why windows of its memory are not large
    Explain,
    /// Replace its policy, or switch it off
    SetPolicy {
        /// off, or a policy as for --policy of `wideleaf run`; a policy that needs preparation at the start is refused
        #[arg(value_name = "NAME[:KEY=VALUE,...]", value_parser = PolicyOrOff::parse)]
        policy: PolicyOrOff,
    },
    /// Set the size of its balloon, taken from the guest's RAM
    Balloon {
        /// Total size, not an addition; 0 gives it all back
        #[arg(value_name = "SIZE", value_parser = Bytes::parse)]
        target: Bytes,
    },
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum StopArg {
    /// Press its power button: a guest that listens to it ends when it is ready
    Ask,
    /// Stop at once; data that the guest has not written to its disks are lost
    Kill,
}

/// Runs the subcommand `vm`.
///
/// # Errors
/// [`Failure`] in one line.
pub fn main(args: &VmSocketArgs) -> Result<(), Failure> {
    let request = match &args.command {
        VmCommand::Ask(question) => request(question)?,
        VmCommand::Snapshot(of) => return snapshot::main(&args.socket, of, args.format),
        VmCommand::Migrate(to) => return migrate::main(&args.socket, to, args.format),
        VmCommand::Recover(of) => return recover::main(&args.socket, of, args.format),
    };
    let answer = ask(&args.socket, request)?;
    let output = Output::open(args.format, None)?;
    match answer {
        VmAnswer::Status(status) => output.write(&status, status_table),
        VmAnswer::Statistics(statistics) => output.write(&statistics, |all| statistics_table(all)),
        VmAnswer::Windows(map) => output.write(&map, |map| map_text::text(map)),
        VmAnswer::Explanation(explanation) => output.write(&explanation, |all| tables::explanation(all)),
        VmAnswer::Device(device) => output.write(&device, |device| devices_table(std::slice::from_ref(device))),
        VmAnswer::Hello(_) | VmAnswer::Saved(_) | VmAnswer::Migrated(_) | VmAnswer::Recovered(_) => {
            Err(progress::other_answer(&args.socket))
        }
    }
}

fn request(question: &Question) -> Result<VmRequest, Failure> {
    Ok(match question {
        Question::Pause => VmRequest::Pause,
        Question::Resume => VmRequest::Resume,
        Question::Stop { how: StopArg::Ask } => VmRequest::Stop { how: StopHow::Ask, if_paused: false },
        Question::Stop { how: StopArg::Kill } => VmRequest::Stop { how: StopHow::Kill, if_paused: false },
        Question::Reset => VmRequest::Reset,
        Question::Status => VmRequest::Status,
        Question::Statistics => VmRequest::Statistics,
        Question::Windows => VmRequest::Windows,
        Question::Explain => VmRequest::Explain,
        Question::SetPolicy { policy } => VmRequest::SetPolicy { policy: policy.read("set-policy")? },
        Question::Balloon { target } => VmRequest::Balloon { target_bytes: target.get() },
    })
}

fn status_table(status: &VmStatus) -> String {
    let VmStatus {
        state,
        workload,
        pid,
        uptime_s,
        vcpus,
        resets,
        policy,
        phase,
        virtio,
        saving,
        restoring,
        past_saves,
        doubt,
        cut_off,
        exit,
        waits_for,
    } = status;
    let state = match state {
        VmState::Running => "running",
        VmState::Paused => "paused",
        VmState::Ending => "ending",
        VmState::Ended => "ended",
    };
    let of = |wanted| vcpus.iter().filter(|vcpu| **vcpu == wanted).count();
    let mut out = String::new();
    let mut line = |name: &str, value: &str| {
        let _ = writeln!(out, "{name:<16} {}", clean(value));
    };
    line("state", state);
    line("workload", workload);
    line("process", &pid.to_string());
    line("up for", &format!("{uptime_s:.1} s"));
    let (running, paused, finished) = (of(VcpuView::Running), of(VcpuView::Paused), of(VcpuView::Finished));
    line("vCPUs", &format!("{running} running, {paused} paused, {finished} finished"));
    if *resets > 0 {
        line("resets", &resets.to_string());
    }
    line("policy", policy);
    if let Some(PhaseView { name, since_s, done }) = phase {
        line("phase", &format!("{name} for {since_s:.1} s, {done} units done"));
    }
    for DeviceView { device, driver, .. } in virtio {
        line("device", &format!("{device}: {}", driver_text(*driver)));
    }
    if let Some(SavingView { round, done_bytes, total_bytes }) = saving {
        let (done, total) = (Bytes::new(*done_bytes), Bytes::new(*total_bytes));
        line("saving", &format!("{done} of {total}, round {round}"));
    }
    if let Some(RestoringView { filled_bytes, stored_bytes }) = restoring {
        let (filled, stored) = (Bytes::new(*filled_bytes), Bytes::new(*stored_bytes));
        line("restoring", &format!("{filled} of {stored} have come from the snapshot"));
    }
    past_saves.iter().for_each(|past| past_lines(past, &mut line));
    for (name, text) in [("in doubt", doubt), ("cut off", cut_off), ("exit", exit), ("waits for", waits_for)] {
        text.iter().for_each(|text| line(name, text));
    }
    out
}

/// Lines about snapshots and migrations that are over.
fn past_lines(past: &PastSavesView, line: &mut impl FnMut(&str, &str)) {
    if past.snapshots + past.snapshots_failed > 0 {
        line("snapshots", &snapshots_text(past));
    }
    if past.migrations > 0 || past.arrival_downtime_ms.is_some() {
        let without = past.arrival_downtime_ms.map_or(String::new(), |ms| format!("; no guest ran for {ms:.1} ms"));
        let before = before_pause(past.arrival_before_pause.as_ref());
        line("came here", &format!("from another run{without}{before}"));
    }
    if past.migrations_failed > 0 {
        line("migrations", &format!("{} failed", past.migrations_failed));
    }
    if let Some(failed) = &past.last_failed {
        line("latest failure", &paid(failed, "until then"));
    }
    if let Some(remapped) = &past.last_remapped {
        line("KVM's mappings", &remapped_text(remapped));
    }
}

fn snapshots_text(past: &PastSavesView) -> String {
    let PastSavesView { snapshots, snapshots_failed, last_pause_ms, last_before_pause, .. } = past;
    let failed = if *snapshots_failed == 0 { String::new() } else { format!(", {snapshots_failed} failed") };
    let latest = last_pause_ms.map_or(String::new(), |ms| {
        format!("; in the latest, the guest paused for {ms:.1} ms{}", before_pause(last_before_pause.as_ref()))
    });
    format!("{snapshots} written{failed}{latest}")
}

/// How KVM's large mappings came back after a save.
fn remapped_text(remapped: &RemappedView) -> String {
    let RemappedView { large_before_bytes, large_after_bytes, seconds } = remapped;
    let (before, after) = (Bytes::new(*large_before_bytes), Bytes::new(*large_after_bytes));
    let again = match seconds {
        Some(seconds) => format!("nine tenths were large again after {seconds:.2} s"),
        None => "less than nine tenths have been large again since".to_owned(),
    };
    format!("{before} large before the latest save, {after} after it; {again}")
}

const fn driver_text(driver: DriverView) -> &'static str {
    match driver {
        DriverView::None => "the guest has not found it",
        DriverView::Found => "the guest has no driver for it",
        DriverView::Probing => "its driver is starting",
        DriverView::Ready => "driver ready",
        DriverView::Failed => "its driver failed",
    }
}

fn statistics_table(all: &VmStatistics) -> String {
    let mut out = tables::vm(&all.vm, None);
    for (device, counters) in &all.devices {
        for (name, count) in counters {
            let _ = writeln!(out, "{} {}: {count}", clean(device), clean(name).replace('_', " "));
        }
    }
    if !all.virtio.is_empty() {
        let _ = write!(out, "\n{}", devices_table(&all.virtio));
    }
    out
}

/// A row for each counter that is not zero, and for all sizes; a device without counters has a row for its driver only.
fn devices_table(devices: &[DeviceView]) -> String {
    let mut rows = table(&["device", "driver", "counted", ""]);
    for DeviceView { device, driver, counters } in devices {
        let (mut device, mut driver) = (clean(device), driver_text(*driver));
        let mut shown = counters.iter().filter(|(name, count)| **count > 0 || name.ends_with("_bytes")).peekable();
        if shown.peek().is_none() {
            rows.add_row([device.as_str(), driver]);
        }
        for (name, count) in shown {
            let (name, count) = counter(&clean(name), *count);
            // Shown once, in the first row.
            let first = Cell::new(std::mem::take(&mut device));
            rows.add_row([first, Cell::new(std::mem::take(&mut driver)), Cell::new(name), number(count)]);
        }
    }
    format!("{rows}\n")
}

/// A counter for people: the unit after the number, if the name has one.
fn counter(name: &str, count: u64) -> (String, String) {
    match name.strip_suffix("_bytes") {
        Some(name) => (name.replace('_', " "), tables::bytes(count)),
        None => match name.strip_suffix("_ms") {
            Some(name) => (name.replace('_', " "), format!("{count} ms")),
            None => (name.replace('_', " "), count.to_string()),
        },
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn the_status_says_how_saves_ended_and_what_the_latest_cost() {
        let of = |past: &str| {
            let status = format!(
                r#"{{"state":"running","workload":"gups","pid":1,"uptime_s":2.5,"vcpus":[],"policy":"off",
                    "past_saves":{{"snapshots":3,"snapshots_failed":1,"migrations_failed":0{past}}}}}"#
            );
            status_table(&serde_json::from_str(&status).expect("a status"))
        };
        assert!(of("").ends_with("snapshots        3 written, 1 failed\n"), "{}", of(""));
        let told = of(r#","last_pause_ms":12.5,"arrival_downtime_ms":40,
            "last_before_pause":{"seconds":1.25,"system_ms":184,"faults":700,"exits":800}"#);
        let expected = "snapshots        3 written, 1 failed; in the latest, the guest paused for 12.5 ms; in the \
                        1.25 s before the pause its vCPUs spent 184 ms in KVM and the kernel, with 700 faults and \
                        800 exits\n\
                        came here        from another run; no guest ran for 40.0 ms\n";
        assert!(told.ends_with(expected), "{told}");
        let told = of(r#","migrations":1,
            "arrival_before_pause":{"seconds":2,"system_ms":70,"faults":5,"exits":6},
            "last_failed":{"seconds":0.5,"system_ms":90,"faults":7,"exits":8}"#);
        let expected = "snapshots        3 written, 1 failed\n\
                        came here        from another run; in the 2.00 s before the pause its vCPUs spent 70 ms in KVM \
                        and the kernel, with 5 faults and 6 exits\n\
                        latest failure   in the 0.50 s until then its vCPUs spent 90 ms in KVM and the kernel, with 7 \
                        faults and 8 exits\n";
        assert!(told.ends_with(expected), "{told}");
        let told = |seconds: &str| {
            let sizes = r#""large_before_bytes":33554432,"large_after_bytes":4194304"#;
            of(&format!(r#","last_remapped":{{{sizes}{seconds}}}"#))
        };
        let sizes = "KVM's mappings   32 MiB large before the latest save, 4 MiB after it; ";
        let expected = format!("{sizes}nine tenths were large again after 0.75 s\n");
        assert!(told(r#","seconds":0.75"#).ends_with(&expected), "{}", told(""));
        let expected = format!("{sizes}less than nine tenths have been large again since\n");
        assert!(told("").ends_with(&expected), "{}", told(""));
    }

    #[test]
    fn the_phase_under_way_is_named_and_control_characters_of_the_guest_are_not_printed() {
        let status = r#"{"state":"running","workload":"cg","pid":1,"uptime_s":2.5,"vcpus":[],"policy":"off",
            "phase":{"name":"com\u001b[2Jpute","since_s":1.25,"done":7}}"#;
        let told = status_table(&serde_json::from_str(status).expect("a status"));
        assert!(told.ends_with("pute for 1.2 s, 7 units done\n") && !told.contains('\u{1b}'), "{told}");
    }

    #[test]
    fn counters_have_the_unit_of_their_name_and_a_device_is_named_once() {
        let counters = [("guest_free_bytes", 5 << 20), ("guest_age_ms", 12), ("requests", 3), ("reports_cut", 0)];
        let counters = BTreeMap::from(counters.map(|(name, count)| (name.to_owned(), count)));
        let balloon = DeviceView { device: "balloon".into(), driver: DriverView::Ready, counters };
        let rng = DeviceView { device: "rng".into(), driver: DriverView::Found, counters: BTreeMap::new() };
        let text = devices_table(&[balloon, rng]);
        let words = text.lines().map(|line| line.split([' ', '│', '┆']).filter(|word| !word.is_empty()));
        let lines: Vec<Vec<&str>> = words.map(Iterator::collect).collect();
        let has = |words: &[&str]| assert!(lines.iter().any(|line| line == words), "no {words:?} in\n{text}");
        has(&["balloon", "driver", "ready", "guest", "age", "12", "ms"]);
        has(&["guest", "free", "5", "MiB"]);
        has(&["requests", "3"]);
        has(&["rng", "the", "guest", "has", "no", "driver", "for", "it"]);
        assert_eq!(lines.iter().flatten().filter(|word| ["balloon", "cut"].contains(word)).count(), 1);
    }
}
