//! All VMs of the host, and the one that a client asked for.
//!
//! ```text
//!   /proc/*/fd ── anon_inode:kvm-vm ──▶ a VM              (fd not readable: QEMU by its command line)
//!   name, UUID, process id ───────────▶ one of these
//!   a QMP socket ── SO_PEERCRED ──────▶ the process that listens there
//! ```

use std::fs;
use std::io;
use std::path::PathBuf;

use wideleaf_control::protocol::Target;

use crate::places::Places;
use crate::process::{ProcessError, VmProcess};
use crate::qmp::{ANSWER_WITHIN, Qmp, QmpError};

/// VMs that were found, and reasons for missing ones.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// VMs ascending by process id.
    pub guests: Vec<VmProcess>,
    /// Reasons why there may be more.
    pub notes: Vec<String>,
}

/// Reason for not finding exactly one guest.
#[derive(Debug, thiserror::Error)]
pub enum FindError {
    /// Processes cannot be listed.
    #[error("cannot list processes in {}: {source}", path.display())]
    Proc {
        /// Path of the folder.
        path: PathBuf,
        /// Error from the kernel.
        source: io::Error,
    },
    /// The process does not exist, or cannot be examined.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// The process runs no VM.
    #[error("process {pid} ({program}) has no KVM guest; `wideleaf list` shows those that have one")]
    NotAVm {
        /// Id of the process.
        pid: u32,
        /// Name of its program.
        program: String,
    },
    /// No VM has that name.
    #[error("no VM on this host is called {name:?}{}", named_list(.known))]
    Unknown {
        /// Name as it was written.
        name: String,
        /// Names of the existing VMs.
        known: Vec<String>,
    },
    /// More than one VM has that name.
    #[error("{} VMs are called {name:?}: name one by its process id ({})", .pids.len(), list(.pids))]
    Several {
        /// Name as it was written.
        name: String,
        /// Ids of their processes.
        pids: Vec<u32>,
    },
    /// The monitor does not answer.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// Another process opened the socket, as libvirt does for its domains.
    #[error(
        "the socket {} was opened by process {pid} and not by the VM itself: name the VM by its process id or domain",
        path.display()
    )]
    SocketOfOthers {
        /// Path of the socket.
        path: PathBuf,
        /// Process that opened it.
        pid: u32,
    },
}

fn named_list(names: &[String]) -> String {
    if names.is_empty() { "; there are no VMs".into() } else { format!("; there are {}", names.join(", ")) }
}

fn list(pids: &[u32]) -> String {
    pids.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
}

/// Examines all processes. Those that do not answer are included, with a note.
///
/// # Errors
/// [`FindError`] where `/proc` is missing, or this process lacks files or memory: any process may then be a VM. One
/// that ends during the scan is left out.
pub fn all(places: &Places) -> Result<Found, FindError> {
    let error = |source| FindError::Proc { path: places.proc.clone(), source };
    let entries = fs::read_dir(&places.proc).map_err(error)?;
    let mut pids: Vec<u32> = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect();
    pids.sort_unstable();
    let guests = VmProcess::look_at_all(places, pids.into_iter())?;
    let hidden = guests.iter().filter_map(|guest| guest.descriptors.as_ref().err()).next();
    let notes = hidden.map(|lost| format!("guests of other programs than QEMU may be missing: {lost}"));
    Ok(Found { guests, notes: notes.into_iter().collect() })
}

/// Finds the guest that a client names.
///
/// # Errors
/// [`FindError`], one line.
pub fn resolve(places: &Places, target: &Target) -> Result<VmProcess, FindError> {
    match target {
        Target::Pid(pid) => with_pid(places, *pid),
        Target::Domain(name) => named(places, name),
        Target::Qmp(path) => {
            let mut guest = None;
            let is_a_vm = |pid| {
                let found = with_pid(places, pid).map_err(|error| match error {
                    FindError::NotAVm { pid, .. } => FindError::SocketOfOthers { path: path.clone(), pid },
                    other => other,
                })?;
                guest = Some(found);
                Ok::<(), FindError>(())
            };
            Qmp::connect_to(path, ANSWER_WITHIN, is_a_vm)?;
            guest.ok_or_else(|| FindError::Unknown { name: path.display().to_string(), known: Vec::new() })
        }
    }
}

/// Finds the guest of a process.
///
/// # Errors
/// [`FindError`] where the process does not exist, or has no guest.
pub fn with_pid(places: &Places, pid: u32) -> Result<VmProcess, FindError> {
    let not_a_vm = || {
        let program = fs::read_to_string(places.proc.join(pid.to_string()).join("comm")).unwrap_or_default();
        FindError::NotAVm { pid, program: program.trim().to_owned() }
    };
    VmProcess::look(places, pid)?.ok_or_else(not_a_vm)
}

/// Finds the guest with that name, UUID or process id.
///
/// # Errors
/// [`FindError`] where no guest has it, or more than one.
pub fn named(places: &Places, name: &str) -> Result<VmProcess, FindError> {
    // The kernel assigns process ids, while processes choose their names. A number means the process id first, so
    // that a process cannot claim another's id as its name.
    if let Some(guest) = name.parse().ok().and_then(|pid| VmProcess::look(places, pid).ok().flatten()) {
        return Ok(guest);
    }
    let mut guests = all(places)?.guests;
    let is_meant = |guest: &VmProcess| {
        guest.name == name || guest.uuid.as_deref().is_some_and(|uuid| uuid.eq_ignore_ascii_case(name))
    };
    let pids: Vec<_> = guests.iter().filter(|guest| is_meant(guest)).map(|guest| guest.pid).collect();
    match pids[..] {
        [pid] => {
            guests.retain(|guest| guest.pid == pid);
            Ok(guests.remove(0))
        }
        [] => {
            Err(FindError::Unknown { name: name.into(), known: guests.into_iter().map(|guest| guest.name).collect() })
        }
        _ => Err(FindError::Several { name: name.into(), pids }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::places::tests::{fake_places, say_domain};
    use crate::process::tests::add_process;

    const VM: &[&str] = &["/dev/kvm", "anon_inode:kvm-vm"];

    #[test]
    fn a_guest_is_found_by_name_uuid_and_process() {
        let (_folder, places) = fake_places();
        add_process(&places, 7, &["qemu-system-x86_64", "-name", "web", "-uuid", "ab-1"], VM);
        add_process(&places, 8, &["/usr/bin/firecracker"], VM);
        add_process(&places, 9, &["bash"], &["/dev/null"]);
        let found = all(&places).expect("the folder is there");
        assert_eq!(found.guests.iter().map(|guest| guest.pid).collect::<Vec<_>>(), [7, 8]);
        assert!(found.notes.is_empty());
        for name in ["web", "7", "AB-1"] {
            assert_eq!(named(&places, name).expect("it is there").pid, 7, "{name}");
        }
        assert_eq!(resolve(&places, &Target::Pid(8)).expect("it is there").name, "8");
    }

    #[test]
    fn a_process_with_the_name_of_a_domain_or_a_process_id_is_not_mistaken_for_it() {
        let (_folder, places) = fake_places();
        add_process(&places, 7, &["qemu-system-x86_64", "-name", "web", "-uuid", "u-1"], VM);
        add_process(&places, 8, &["qemu-system-x86_64", "-name", "web", "-uuid", "u-1"], VM);
        add_process(&places, 9, &["qemu-system-x86_64", "-name", "7"], VM);
        say_domain(&places, "web", 7);
        for name in ["web", "u-1"] {
            let error = named(&places, name).expect_err("two are").to_string();
            assert_eq!(error, format!("2 VMs are called {name:?}: name one by its process id (7, 8)"));
        }
        assert_eq!(named(&places, "7").expect("process 7").name, "web");
        let domain = |pid| with_pid(&places, pid).expect("it is there").domain;
        assert_eq!([7, 8, 9].map(domain), [Some("web".to_owned()), None, None]);
    }

    #[test]
    fn nothing_is_written_to_a_socket_of_another_service_and_its_text_is_not_shown() {
        let (folder, places) = fake_places();
        add_process(&places, std::process::id(), &["sshd"], &["/dev/null"]);
        let path = folder.path().join("service");
        let listener = std::os::unix::net::UnixListener::bind(&path).expect("the socket is new");
        let service = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("we connect");
            let _ = std::io::Write::write_all(&mut stream, b"220 secret\r\n");
            let mut heard = Vec::new();
            // A close with unread bytes resets the connection.
            let _ = std::io::Read::read_to_end(&mut stream, &mut heard);
            heard
        });
        let error = resolve(&places, &Target::Qmp(path)).expect_err("it is no VM").to_string();
        assert!(error.contains("was opened by process") && !error.contains("secret"), "{error}");
        assert_eq!(service.join().expect("it ends"), b"", "not a byte was written to it");
    }

    #[test]
    fn the_error_for_an_unknown_vm_is_one_line_with_the_known_ones() {
        let (_folder, places) = fake_places();
        let error = |name: &str| named(&places, name).expect_err("not there").to_string();
        assert_eq!(error("db"), "no VM on this host is called \"db\"; there are no VMs");
        add_process(&places, 7, &["qemu-system-x86_64", "-name", "web"], VM);
        add_process(&places, 8, &["qemu-system-x86_64", "-name", "web"], VM);
        add_process(&places, 9, &["bash"], &["/dev/null"]);
        std::fs::write(places.proc.join("9/comm"), "bash\n").expect("written");
        assert_eq!(error("db"), "no VM on this host is called \"db\"; there are web, web");
        assert_eq!(error("web"), "2 VMs are called \"web\": name one by its process id (7, 8)");
        let no_guest = resolve(&places, &Target::Pid(9)).expect_err("bash");
        assert_eq!(
            no_guest.to_string(),
            "process 9 (bash) has no KVM guest; `wideleaf list` shows those that have one"
        );
        let missing = resolve(&places, &Target::Pid(10)).expect_err("no such process");
        assert_eq!(missing.to_string(), "there is no process 10");
    }

    #[test]
    fn a_guest_with_hidden_files_brings_a_note_that_others_may_be_missing() {
        let (_folder, places) = fake_places();
        add_process(&places, 7, &["qemu-system-x86_64", "-name", "web"], &[]);
        std::fs::remove_dir(places.proc.join("7/fd")).expect("it is empty");
        let found = all(&places).expect("the folder is there");
        assert_eq!(found.guests.len(), 1);
        assert!(found.notes[0].contains("CAP_SYS_PTRACE"), "{:?}", found.notes);
    }
}
