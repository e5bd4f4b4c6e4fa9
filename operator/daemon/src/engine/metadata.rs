//! What the metadata of running libvirt domains say: Nova's flavor, and mistakes.
//!
//! A domain may have started without the hook or the daemon, or its metadata may have changed since. At `reconnect`
//! libvirtd would kill a guest that its hook refuses, so the daemon only reports mistakes: once in the log, and in the
//! view of the VM as long as it runs or until libvirt reports metadata without them.

use wideleaf_control::protocol::{Answer, Target};

use super::Engine;
use super::requests::process_of;

impl Engine {
    /// Remembers the mistakes in the metadata of a running domain.
    pub(super) fn note_mistakes(&self, domain: &str, pid: u32, mistakes: Vec<String>) -> Result<(), String> {
        if mistakes.is_empty() && self.table().mistakes.is_empty() {
            return Ok(());
        }
        let process = self.doors.guests.resolve(&Target::Pid(pid))?.process;
        let mut table = self.table();
        let is_new = table.mistakes.get(&process).is_none_or(|known| *known != mistakes);
        for mistake in mistakes.iter().filter(|_| is_new) {
            tracing::warn!("{domain} (pid {pid}) runs without what its metadata ask for: {mistake}");
        }
        if mistakes.is_empty() {
            table.mistakes.remove(&process);
        } else {
            table.mistakes.insert(process, mistakes);
        }
        Ok(())
    }

    /// Remembers Nova's flavor of a running domain, for as long as its process runs.
    pub(super) fn note_flavor(&self, pid: u32, flavor: Option<String>) -> Result<(), String> {
        if flavor.is_none() && self.table().flavors.is_empty() {
            return Ok(());
        }
        let process = self.doors.guests.resolve(&Target::Pid(pid))?.process;
        let mut table = self.table();
        match flavor {
            Some(flavor) => table.flavors.insert(process, flavor),
            None => table.flavors.remove(&process),
        };
        Ok(())
    }

    /// The answer, with the mistakes in the metadata among the notes of its VMs.
    pub(super) fn with_mistakes(&self, mut answer: Answer) -> Answer {
        let table = self.table();
        let views = match &mut answer {
            Answer::Vm(view) => std::slice::from_mut(&mut **view),
            Answer::Vms(views) => views.as_mut_slice(),
            _ => &mut [],
        };
        for view in views {
            let mistakes = table.mistakes.get(&process_of(view)).into_iter().flatten();
            view.notes.splice(0..0, mistakes.map(|mistake| format!("a mistake in its metadata: {mistake}")));
        }
        answer
    }
}
