//! libvirt's own command, for domains with a monitor that only libvirt uses. It runs read-only (`--readonly`), so
//! that no domain is changed or tainted, and with a deadline. Each call costs a process and a connection, some 20
//! ms, so callers use it rarely.

use std::io::{self, Read as _};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use wideleaf_policies::MappingStats;

/// Time that virsh may take: libvirtd may be busy with another domain.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// Upper bound on its output, in bytes.
const ANSWER_BYTES_MAX: u64 = 1 << 20;

/// The command virsh.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Virsh {
    program: PathBuf,
}

impl Default for Virsh {
    fn default() -> Virsh {
        Virsh { program: "virsh".into() }
    }
}

/// Reason for a missing answer.
#[derive(Debug, thiserror::Error)]
pub enum VirshError {
    /// The program does not start.
    #[error("cannot start {program}: {source} (Debian: libvirt-clients)")]
    Start {
        /// Program that was started.
        program: String,
        /// Error from the kernel.
        source: io::Error,
    },
    /// The command took too long.
    #[error(
        "virsh {0} did not answer within {time} ms: libvirtd is busy or waits for a hook",
        time = ANSWER_WITHIN.as_millis()
    )]
    TimedOut(&'static str),
    /// The command failed.
    #[error("virsh {what}: {said}")]
    Failed {
        /// Name of the command.
        what: &'static str,
        /// First line of its error output.
        said: String,
    },
}

/// Libvirt's present work on a domain's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Job {
    /// No work on its memory.
    None,
    /// Migration of the domain to another host.
    Migration,
    /// Migration of the domain to this host.
    Arrival,
    /// Saving, dumping or restoring the domain.
    Snapshot,
}

impl Virsh {
    /// Uses another program in its place.
    pub fn at(program: impl Into<PathBuf>) -> Virsh {
        Virsh { program: program.into() }
    }

    /// KVM's mappings by size (`domstats --vm`; libvirt 8.9 with QEMU 7.1).
    ///
    /// # Errors
    /// [`VirshError`], also where libvirt does not have them.
    pub fn mappings(&self, domain: &str) -> Result<MappingStats, VirshError> {
        let text = self.run("domstats", &["--vm", "--", domain])?;
        mappings(&text).ok_or(VirshError::Failed {
            what: "domstats",
            said: "no vm.pages_2m.cur: libvirt 8.9 and QEMU 7.1 have it".into(),
        })
    }

    /// Present work on a domain's memory (`domjobinfo`).
    ///
    /// # Errors
    /// [`VirshError`] without an answer.
    pub fn job(&self, domain: &str) -> Result<Job, VirshError> {
        Ok(job(&self.run("domjobinfo", &["--", domain])?))
    }

    fn run(&self, what: &'static str, arguments: &[&str]) -> Result<String, VirshError> {
        let mut command = Command::new(&self.program);
        command.args(["--readonly", "--connect", "qemu:///system", what]).args(arguments).env("LC_ALL", "C");
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let start_error = |source| VirshError::Start { program: self.program.display().to_string(), source };
        let mut child = child.map_err(start_error)?;
        let (told, hear) = mpsc::channel();
        let (out, err) = (child.stdout.take(), child.stderr.take());
        thread::spawn(move || {
            let _ = told.send((bounded(out), bounded(err)));
        });
        let said = hear.recv_timeout(ANSWER_WITHIN);
        if said.is_err() {
            let _ = child.kill();
        }
        let status = child.wait().map_err(start_error)?;
        match said {
            // A child of virsh may still hold its pipes; the thread that reads them ends when that child does.
            Err(_) => Err(VirshError::TimedOut(what)),
            Ok((out, _)) if status.success() => Ok(out),
            Ok((_, err)) => {
                Err(VirshError::Failed { what, said: err.lines().next().unwrap_or("it failed").to_owned() })
            }
        }
    }
}

fn bounded(pipe: Option<impl io::Read>) -> String {
    let mut bytes = Vec::new();
    let read = pipe.map(|pipe| pipe.take(ANSWER_BYTES_MAX).read_to_end(&mut bytes));
    debug_assert!(read.is_some(), "pipes were asked for");
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Parses `  vm.pages_2m.cur=128`.
fn mappings(text: &str) -> Option<MappingStats> {
    let figure = |name: &str| {
        let value = text.lines().find_map(|line| line.trim().strip_prefix(name));
        value.and_then(|value| value.parse().ok())
    };
    Some(MappingStats {
        pages_4k: figure("vm.pages_4k.cur=")?,
        pages_2m: figure("vm.pages_2m.cur=")?,
        pages_1g: figure("vm.pages_1g.cur=")?,
    })
}

/// Parses `Job type: Unbounded` and `Operation: Outgoing migration`.
fn job(text: &str) -> Job {
    let figure =
        |name: &str| text.lines().find_map(|line| line.trim().strip_prefix(name)).map(str::trim).unwrap_or_default();
    match (figure("Job type:"), figure("Operation:")) {
        ("None" | "", _) => Job::None,
        (_, "Incoming migration") => Job::Arrival,
        (_, operation) if operation.contains("migration") => Job::Migration,
        (_, "Save" | "Restore" | "Dump" | "Snapshot" | "Snapshot revert") => Job::Snapshot,
        _ => Job::None,
    }
}

/// The running job according to libvirt's status file of a domain: `<job type='…' async='migration out' …>`.
pub fn job_of_status(xml: &str) -> Job {
    let tag = xml.split_once("<job ").and_then(|(_, rest)| rest.split_once('>')).map_or("", |(tag, _)| tag);
    let name = tag.split_once("async='").and_then(|(_, rest)| rest.split_once('\'')).map_or("", |(name, _)| name);
    match name {
        "migration out" => Job::Migration,
        "migration in" => Job::Arrival,
        "save" | "dump" | "snapshot" => Job::Snapshot,
        _ => Job::None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fs;

    /// A program that runs a script in place of virsh.
    fn answering(script: &str) -> (tempfile::TempDir, Virsh) {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let [text, path] = ["text", "virsh"].map(|name| folder.path().join(name));
        fs::write(&text, format!("#!/bin/sh\n{script}\n")).expect("written");
        // Another process copies it: a child that another thread has just forked can hold a file that this one
        // writes open for writing. Until that closes, starting the file is "Text file busy" (execve(2), ETXTBSY).
        let copied = Command::new("install").args(["-m", "700"]).args([&text, &path]).status();
        assert!(copied.expect("install(1) starts").success());
        (folder, Virsh::at(path))
    }

    #[test]
    fn kvms_mappings_are_read_from_domstats() {
        let (_folder, virsh) =
            answering("echo \"Domain: 't1'\n  vm.pages_4k.cur=40\n  vm.pages_2m.cur=128\n  vm.pages_1g.cur=0\"");
        let stats = virsh.mappings("t1").expect("it answers");
        assert_eq!(stats, MappingStats { pages_4k: 40, pages_2m: 128, pages_1g: 0 });
        let (_folder, old) = answering("echo \"Domain: 't1'\"");
        assert!(old.mappings("t1").expect_err("nothing there").to_string().contains("libvirt 8.9"));
    }

    #[test]
    fn the_message_of_a_failing_virsh_is_passed_on() {
        let (_folder, virsh) = answering("echo \"error: failed to get domain 'x'\" >&2; exit 1");
        assert_eq!(
            virsh.job("x").expect_err("it fails").to_string(),
            "virsh domjobinfo: error: failed to get domain 'x'"
        );
        let absent = Virsh::at("/nonexistent/virsh").job("x").expect_err("it is not there");
        assert!(absent.to_string().contains("/nonexistent/virsh"), "{absent}");
    }

    #[test]
    fn a_virsh_that_hangs_is_ended() {
        let (_folder, virsh) = answering("exec sleep 60");
        assert!(matches!(virsh.job("x"), Err(VirshError::TimedOut("domjobinfo"))));
    }

    #[test]
    fn a_child_of_a_virsh_that_hangs_is_not_waited_for() {
        let (folder, virsh) = answering("(sleep 8; touch $(dirname $0)/ended) & sleep 8");
        assert!(matches!(virsh.job("x"), Err(VirshError::TimedOut("domjobinfo"))));
        assert!(!folder.path().join("ended").exists(), "it was waited for");
    }

    #[test]
    fn jobs_that_touch_memory_are_distinguished_from_others() {
        assert_eq!(job("Job type:         None        \n"), Job::None);
        assert_eq!(job("Job type:         Unbounded   \nOperation:        Outgoing migration\n"), Job::Migration);
        assert_eq!(job("Job type:         Unbounded   \nOperation:        Incoming migration\n"), Job::Arrival);
        assert_eq!(job("Job type:         Bounded\nOperation:        Save\n"), Job::Snapshot);
        assert_eq!(job("Job type:         Bounded\nOperation:        Backup\n"), Job::None);
        assert_eq!(
            job_of_status("<domstatus>\n  <job type='none' async='migration out' phase='perform3' flags='0x0'>"),
            Job::Migration
        );
        assert_eq!(job_of_status("<job type='none' async='migration in' phase='prepare'>"), Job::Arrival);
        assert_eq!(
            job_of_status("<job type='none' async='dump' flags='0x10' asyncStarted='1795298981303'/>"),
            Job::Snapshot
        );
        assert_eq!(job_of_status("<job type='modify' async='none'/><x async='save'/>"), Job::None);
        assert_eq!(job_of_status(""), Job::None);
    }

    proptest! {
        #[test]
        fn no_text_causes_a_panic(text in "(.{0,20}|<job |async='|Job type:|vm.pages_2m.cur=|\n){0,12}") {
            let _ = (mappings(&text), job(&text), job_of_status(&text));
        }
    }
}
