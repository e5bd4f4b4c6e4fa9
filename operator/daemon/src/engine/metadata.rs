//! Mistakes in the metadata of libvirt domains that run all the same: a domain that was started while no hook or daemon
//! was there, and one whose metadata were changed while it ran. At `reconnect` libvirtd would kill the guest that its
//! hook refuses, so they are only told: in the log once, and in the view of the VM for as long as it runs or until
//! libvirt tells of metadata without them.

use wideleaf_control::protocol::{Answer, Target};

use super::Engine;
use super::requests::process_of;

impl Engine {
    /// Remembers what is wrong in the metadata of a domain that runs.
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

    /// The answer, with what is wrong in their metadata among the notes of its VMs.
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
