//! libvirt's own command, for domains whose monitor libvirt has to itself: read-only (`--readonly`), so that no domain is changed or
//! tainted, and with a deadline. It costs a process and a connection each time, some 20 ms: ask rarely.

use std::io::{self, Read as _};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use wideleaf_policies::MappingStats;

/// How long it may take: libvirtd may be busy with another domain.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// No answer of interest is longer.
const ANSWER_BYTES_MAX: u64 = 1 << 20;

/// libvirt's command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Virsh {
    program: PathBuf,
}

impl Default for Virsh {
    fn default() -> Virsh {
        Virsh { program: "virsh".into() }
    }
}

/// Why it does not say.
#[derive(Debug, thiserror::Error)]
pub enum VirshError {
    /// It is not there.
    #[error("cannot start {program}: {source} (Debian: libvirt-clients)")]
    Start {
        /// What was started.
        program: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// It took too long.
    #[error("virsh {0} did not answer within {time} ms: libvirtd is busy or waits for a hook", time = ANSWER_WITHIN.as_millis())]
    TimedOut(&'static str),
    /// It said no.
    #[error("virsh {what}: {said}")]
    Failed {
        /// Its command.
        what: &'static str,
        /// Its own words.
        said: String,
    },
}

/// What libvirt is doing with a domain's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Job {
    /// Nothing.
    None,
    /// Migrating it.
    Migration,
    /// Saving, dumping or restoring it.
    Snapshot,
}

impl Virsh {
    /// Another program in its place.
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

    /// What is being done with a domain's memory (`domjobinfo`).
    ///
    /// # Errors
    /// [`VirshError`].
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
            // Whatever virsh started may still have its pipes, and the thread that reads them ends when that does.
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

/// `  vm.pages_2m.cur=128`
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

/// `Job type: Unbounded` and `Operation: Outgoing migration`.
fn job(text: &str) -> Job {
    let figure =
        |name: &str| text.lines().find_map(|line| line.trim().strip_prefix(name)).map(str::trim).unwrap_or_default();
    match (figure("Job type:"), figure("Operation:")) {
        ("None" | "", _) => Job::None,
        (_, operation) if operation.contains("migration") => Job::Migration,
        (_, "Save" | "Restore" | "Dump" | "Snapshot" | "Snapshot revert") => Job::Snapshot,
        _ => Job::None,
    }
}

/// What libvirt wrote into a domain's status file about the job that runs: `<job type='…' async='migration out' …>`.
pub fn job_of_status(xml: &str) -> Job {
    let tag = xml.split_once("<job ").and_then(|(_, rest)| rest.split_once('>')).map_or("", |(tag, _)| tag);
    let name = tag.split_once("async='").and_then(|(_, rest)| rest.split_once('\'')).map_or("", |(name, _)| name);
    match name {
        "migration out" | "migration in" => Job::Migration,
        "save" | "dump" | "snapshot" => Job::Snapshot,
        _ => Job::None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fs;

    /// A program that answers with a text, and how it ends.
    fn answering(script: &str) -> (tempfile::TempDir, Virsh) {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let [text, path] = ["text", "virsh"].map(|name| folder.path().join(name));
        fs::write(&text, format!("#!/bin/sh\n{script}\n")).expect("written");
        // By a process of its own: a file that this one writes can be open for writing in a child that another thread
        // has just forked, and while it is, starting it is "Text file busy" (execve(2), ETXTBSY).
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
    fn what_virsh_says_when_it_fails_is_handed_on() {
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
    fn what_a_virsh_that_hangs_has_started_is_not_waited_for() {
        let (folder, virsh) = answering("(sleep 8; touch $(dirname $0)/ended) & sleep 8");
        assert!(matches!(virsh.job("x"), Err(VirshError::TimedOut("domjobinfo"))));
        assert!(!folder.path().join("ended").exists(), "it was waited for");
    }

    #[test]
    fn jobs_that_touch_memory_are_told_from_others() {
        assert_eq!(job("Job type:         None        \n"), Job::None);
        assert_eq!(job("Job type:         Unbounded   \nOperation:        Outgoing migration\n"), Job::Migration);
        assert_eq!(job("Job type:         Bounded\nOperation:        Save\n"), Job::Snapshot);
        assert_eq!(job("Job type:         Bounded\nOperation:        Backup\n"), Job::None);
        assert_eq!(
            job_of_status("<domstatus>\n  <job type='none' async='migration out' phase='perform3' flags='0x0'>"),
            Job::Migration
        );
        assert_eq!(
            job_of_status("<job type='none' async='dump' flags='0x10' asyncStarted='1795298981303'/>"),
            Job::Snapshot
        );
        assert_eq!(job_of_status("<job type='modify' async='none'/><x async='save'/>"), Job::None);
        assert_eq!(job_of_status(""), Job::None);
    }

    proptest! {
        #[test]
        fn no_text_is_too_odd(text in "(.{0,20}|<job |async='|Job type:|vm.pages_2m.cur=|\n){0,12}") {
            let _ = (mappings(&text), job(&text), job_of_status(&text));
        }
    }
}
