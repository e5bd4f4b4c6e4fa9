//! What is on the screen and what a key does to it. Draws nothing and asks nobody: [`Effect`] says what is to be asked.
//!
//! ```text
//!            Tab, Enter                          p
//!   list ─▶ map ─▶ explain ─▶ list     any ◀── Esc, Enter ──▶ policies      any ◀── any key ──▶ help
//!     ↑↓ chooses the VM                            ↑↓ chooses the policy
//! ```

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use wideleaf_attach::refuse::refuse_policy;
use wideleaf_control::view::{VmView, Vmm, WindowMap};
use wideleaf_policies::PolicyChoice;
use wideleaf_policies::policy::POLICIES;

use super::watch::{Ask, Detail, Seen};
use crate::guests::settings::OFF;
use crate::source::HostReport;

/// What fills the screen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tab {
    /// All VMs, and what was done lately for the chosen one.
    #[default]
    List,
    /// The chosen VM's memory.
    Map,
    /// Why its windows are not huge.
    Explain,
}

impl Tab {
    const fn next(self) -> Tab {
        match self {
            Tab::List => Tab::Map,
            Tab::Map => Tab::Explain,
            Tab::Explain => Tab::List,
        }
    }
}

/// What lies over it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Overlay {
    /// Nothing.
    #[default]
    None,
    /// The keys.
    Help,
    /// The policies, one of them chosen.
    Policies(usize),
}

/// What follows from a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing but another screen.
    None,
    /// The end.
    Quit,
    /// Ctrl-C, which is a key in a terminal that hands over every key.
    Interrupt,
    /// Somebody has to be asked.
    Ask(Ask),
}

/// The screen.
#[derive(Debug, Default)]
pub struct Screen {
    /// What fills it.
    pub tab: Tab,
    /// What lies over it.
    pub overlay: Overlay,
    /// The host at the last look that worked.
    pub host: Option<HostReport>,
    /// Why the last look did not work.
    pub failure: Option<String>,
    /// What came of the last change.
    pub message: Option<String>,
    /// The chosen VM.
    pub detail: Option<Detail>,
    /// Its windows at the look before.
    pub before: Option<WindowMap>,
    /// Its process; the first one while nothing was chosen or it is gone.
    chosen: Option<u32>,
}

/// Whether a VM can have the policy. Some need what only our own VMM can do, before the guest starts; and a run of ours answers faults from
/// its start on, or never. What else it has not is its own to say.
fn is_possible(vm: &VmView, name: &str) -> bool {
    let of = |name: &str| PolicyChoice::parse(name).ok();
    let answers_faults = |name: &str| of(name).is_some_and(|choice| choice.make().answers_faults());
    match (vm.vmm, name_of_policy(vm)) {
        (Vmm::Wideleaf, own) => own == name || !(answers_faults(own) || answers_faults(name)),
        _ => of(name).is_some_and(|choice| refuse_policy(&choice).is_none()),
    }
}

/// Without what was set of it.
fn name_of_policy(vm: &VmView) -> &str {
    let policy = vm.policy.as_deref().unwrap_or(OFF);
    policy.split_once(':').map_or(policy, |(name, _)| name)
}

impl Screen {
    /// A screen that begins with the map of this process's VM, or with the list.
    pub fn new(chosen: Option<u32>) -> Screen {
        let tab = if chosen.is_some() { Tab::Map } else { Tab::List };
        Screen { tab, chosen, ..Screen::default() }
    }

    /// The VMs of the last look.
    pub fn vms(&self) -> &[VmView] {
        self.host.as_ref().map_or(&[], |host| &host.vms)
    }

    /// Where the chosen VM stands in the list.
    pub fn chosen_index(&self) -> usize {
        self.vms().iter().position(|vm| Some(vm.pid) == self.chosen).unwrap_or(0)
    }

    /// The chosen VM.
    pub fn chosen(&self) -> Option<&VmView> {
        self.vms().get(self.chosen_index())
    }

    /// The policies to choose from for it: those of the house that it can have, and none.
    pub fn policies(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        let chosen = self.chosen();
        let of_the_house = POLICIES.iter().filter(move |policy| chosen.is_some_and(|vm| is_possible(vm, policy.name)));
        of_the_house.map(|policy| (policy.name, policy.summary)).chain([(OFF, "it is only looked at")])
    }

    /// What is known of it beyond the list; `None` until it was looked at.
    pub fn chosen_detail(&self) -> Option<&Detail> {
        let pid = self.chosen()?.pid;
        self.detail.as_ref().filter(|detail| detail.pid == pid)
    }

    /// Takes a look in. What it has to be asked next, where the chosen VM is another than was looked at.
    pub fn take(&mut self, seen: Seen) -> Effect {
        match seen.host {
            Ok(host) => {
                self.host = Some(host);
                self.failure = None;
            }
            // The list stays as it was last seen; the line above it says that it is old.
            Err(failure) => self.failure = Some(failure.to_string()),
        }
        if let Some(message) = seen.message {
            self.message = Some(message);
        }
        if let Some(detail) = seen.detail {
            let before = self.detail.take().filter(|before| before.pid == detail.pid);
            self.before = before.and_then(|before| before.windows.ok());
            self.detail = Some(detail);
        }
        if self.chosen_detail().is_some() { Effect::None } else { self.look() }
    }

    /// What a key does.
    pub fn on_key(&mut self, key: KeyEvent) -> Effect {
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return if key.code == KeyCode::Char('c') { Effect::Interrupt } else { Effect::None };
        }
        match (self.overlay, key.code) {
            (_, KeyCode::Char('q')) => Effect::Quit,
            (Overlay::Policies(at), code) => self.on_key_in_policies(at, code),
            (Overlay::Help, _) => self.lay_over(Overlay::None),
            (Overlay::None, code) => self.on_key_in_tab(code),
        }
    }

    fn on_key_in_tab(&mut self, code: KeyCode) -> Effect {
        match code {
            KeyCode::Esc if self.tab == Tab::List => Effect::Quit,
            KeyCode::Esc => self.show(Tab::List),
            KeyCode::Tab | KeyCode::Enter => self.show(self.tab.next()),
            KeyCode::Up => self.choose(self.chosen_index().saturating_sub(1)),
            KeyCode::Down => self.choose(self.chosen_index() + 1),
            KeyCode::Char('p') if self.chosen().is_some() => self.lay_over(Overlay::Policies(self.present_policy())),
            KeyCode::Char('o') => self.set_policy(OFF),
            KeyCode::Char('?' | 'h') => self.lay_over(Overlay::Help),
            _ => Effect::None,
        }
    }

    fn on_key_in_policies(&mut self, at: usize, code: KeyCode) -> Effect {
        match code {
            KeyCode::Up => self.lay_over(Overlay::Policies(at.saturating_sub(1))),
            KeyCode::Down => self.lay_over(Overlay::Policies((at + 1).min(self.policies().count() - 1))),
            KeyCode::Enter => {
                self.overlay = Overlay::None;
                let chosen = self.policies().nth(at);
                chosen.map_or(Effect::None, |(name, _)| self.set_policy(name))
            }
            KeyCode::Esc => self.lay_over(Overlay::None),
            _ => Effect::None,
        }
    }

    fn show(&mut self, tab: Tab) -> Effect {
        self.tab = tab;
        Effect::None
    }

    fn lay_over(&mut self, overlay: Overlay) -> Effect {
        self.overlay = overlay;
        Effect::None
    }

    fn choose(&mut self, index: usize) -> Effect {
        let last = self.vms().len().saturating_sub(1);
        self.chosen = self.vms().get(index.min(last)).map(|vm| vm.pid);
        self.look()
    }

    fn look(&self) -> Effect {
        self.chosen().map_or(Effect::None, |vm| Effect::Ask(Ask::Look(vm.pid)))
    }

    fn set_policy(&mut self, policy: &str) -> Effect {
        let Some(vm) = self.chosen() else { return Effect::None };
        if vm.vmm == Vmm::Wideleaf && policy != OFF && policy == name_of_policy(vm) {
            self.message = Some(format!("{policy} is in force already"));
            return Effect::None;
        }
        let ask = Ask::SetPolicy(vm.pid, policy.to_owned());
        self.message = Some(format!("asking for {policy}"));
        Effect::Ask(ask)
    }

    /// Where the chosen VM's policy stands among [`Screen::policies`].
    fn present_policy(&self) -> usize {
        let name = self.chosen().map_or(OFF, name_of_policy);
        self.policies().position(|(known, _)| known == name).unwrap_or(0)
    }
}
