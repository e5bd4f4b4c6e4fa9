//! State of the screen, and the effect of keys on it. It draws nothing and sends no requests: [`Effect`] names the
//! request.
//!
//! ```text
//!            Tab, Enter                          p
//!   list ─▶ map ─▶ explain ─▶ list     any ◀── Esc, Enter ──▶ policies      any ◀── any key ──▶ help
//!     ↑↓ chooses the VM                            ↑↓ chooses the policy
//! ```

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use wideleaf_attach::refuse::refuse_policy;
use wideleaf_control::view::{VmView, Vmm, WindowMap, policy_name};
use wideleaf_policies::PolicyChoice;
use wideleaf_policies::policy::POLICIES;
use wideleaf_run::policy_switch::OFF;
use wideleaf_run::text::clean;

use super::heat_map::Column;
use super::watch::{Detail, Sampled, WatchRequest};
use crate::vm_source::HostReport;

/// Content of the screen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tab {
    /// All VMs, and the latest actions for the chosen one.
    #[default]
    List,
    /// Memory of the chosen VM.
    Map,
    /// Reasons why its windows are not huge.
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

/// Box over the screen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Overlay {
    /// No box at all.
    #[default]
    None,
    /// List of the keys.
    Help,
    /// List of the policies, one of them chosen.
    Policies(usize),
}

/// Effect of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Only a redraw of the screen.
    None,
    /// End of the program.
    Quit,
    /// Ctrl-C, which is a key in a terminal in raw mode.
    Interrupt,
    /// A request to the thread that samples.
    Send(WatchRequest),
}

/// State of the screen.
#[derive(Debug, Default)]
pub struct Screen {
    /// Content of the screen.
    pub tab: Tab,
    /// Box over the screen.
    pub overlay: Overlay,
    /// Column that the map shows.
    pub column: Column,
    /// Host at the last successful sample.
    pub host: Option<HostReport>,
    /// Reason why the last sample failed.
    pub failure: Option<String>,
    /// Result of the last change.
    pub message: Option<String>,
    /// Details of the chosen VM.
    pub detail: Option<Detail>,
    /// Its windows at the previous sample.
    pub before: Option<WindowMap>,
    /// Process of the chosen VM, which may have ended. At the first sample with VMs it is the first of them.
    chosen: Option<u32>,
}

/// Whether a VM can use the policy. Some policies need features of `wideleaf run` from before the guest's start,
/// and such a run serves faults from its start on, or never. The VM itself reports other missing features.
fn is_possible(vm: &VmView, name: &str) -> bool {
    let of = |name: &str| PolicyChoice::parse(name).ok();
    let answers_faults = |name: &str| of(name).is_some_and(|choice| choice.make().answers_faults());
    match (vm.vmm, name_of_policy(vm)) {
        (Vmm::Wideleaf, own) => own == name || !(answers_faults(own) || answers_faults(name)),
        _ => of(name).is_some_and(|choice| refuse_policy(&choice).is_none()),
    }
}

/// Name of its policy, without parameters.
fn name_of_policy(vm: &VmView) -> &str {
    policy_name(vm.policy.as_deref().unwrap_or(OFF))
}

impl Screen {
    /// A screen that begins with the map of this process's VM, or with the list.
    pub fn new(chosen: Option<u32>) -> Screen {
        let tab = if chosen.is_some() { Tab::Map } else { Tab::List };
        Screen { tab, chosen, ..Screen::default() }
    }

    /// VMs of the last sample.
    pub fn vms(&self) -> &[VmView] {
        self.host.as_ref().map_or(&[], |host| &host.vms)
    }

    /// Index of the chosen VM in the list; `None` if it has ended.
    pub fn chosen_index(&self) -> Option<usize> {
        self.vms().iter().position(|vm| Some(vm.pid) == self.chosen)
    }

    /// The chosen VM; `None` if it has ended: no key may act on another one.
    pub fn chosen(&self) -> Option<&VmView> {
        self.vms().get(self.chosen_index()?)
    }

    /// Policies to choose from: the built-in ones that the VM can use, and `off`.
    pub fn policies(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        let chosen = self.chosen();
        let of_the_house = POLICIES.iter().filter(move |policy| chosen.is_some_and(|vm| is_possible(vm, policy.name)));
        of_the_house.map(|policy| (policy.name, policy.summary)).chain([(OFF, "the VM is only observed")])
    }

    /// Details of it beyond the list; `None` until they were sampled.
    pub fn chosen_detail(&self) -> Option<&Detail> {
        let pid = self.chosen()?.pid;
        self.detail.as_ref().filter(|detail| detail.pid == pid)
    }

    /// Applies a sample. Returns the next request, if the chosen VM differs from the sampled one.
    pub fn take(&mut self, seen: Sampled) -> Effect {
        match seen.host {
            Ok(host) => self.take_host(host),
            // The list stays as last sampled; the line above says that it is old.
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
        if self.chosen_detail().is_some() { Effect::None } else { self.request_detail() }
    }

    /// If the chosen VM has ended, no other one takes its place before an arrow key chooses it.
    fn take_host(&mut self, host: HostReport) {
        let before = self.chosen().map(|vm| vm.name.clone());
        self.chosen = self.chosen.or(host.vms.first().map(|vm| vm.pid));
        self.host = Some(host);
        self.failure = None;
        if let (Some(name), None) = (before, self.chosen()) {
            self.overlay = Overlay::None;
            self.message = Some(format!("{} has ended", clean(&name)));
        }
    }

    /// Handles a key.
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
            KeyCode::Up => self.choose(self.chosen_index().map_or(0, |index| index.saturating_sub(1))),
            KeyCode::Down => self.choose(self.chosen_index().map_or(0, |index| index + 1)),
            KeyCode::Char('p') if self.chosen().is_some() => self.lay_over(Overlay::Policies(self.present_policy())),
            KeyCode::Char('m') => self.show_next_column(),
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

    /// From another tab it opens the map as it was.
    fn show_next_column(&mut self) -> Effect {
        if self.tab == Tab::Map {
            let map = self.chosen_detail().and_then(|detail| detail.windows.as_ref().ok());
            self.column = self.column.next(map.is_some_and(|map| !map.nodes.is_empty()));
        }
        self.show(Tab::Map)
    }

    fn lay_over(&mut self, overlay: Overlay) -> Effect {
        self.overlay = overlay;
        Effect::None
    }

    fn choose(&mut self, index: usize) -> Effect {
        let last = self.vms().len().saturating_sub(1);
        self.chosen = self.vms().get(index.min(last)).map(|vm| vm.pid);
        self.request_detail()
    }

    fn request_detail(&self) -> Effect {
        self.chosen().map_or(Effect::None, |vm| Effect::Send(WatchRequest::Detail(vm.pid)))
    }

    fn set_policy(&mut self, policy: &str) -> Effect {
        let Some(vm) = self.chosen() else { return Effect::None };
        if vm.vmm == Vmm::Wideleaf && policy != OFF && policy == name_of_policy(vm) {
            self.message = Some(format!("{policy} is in force already"));
            return Effect::None;
        }
        let request = WatchRequest::SetPolicy(vm.pid, policy.to_owned());
        self.message = Some(format!("requesting {policy}"));
        Effect::Send(request)
    }

    /// Index of the chosen VM's policy among [`Screen::policies`].
    fn present_policy(&self) -> usize {
        let name = self.chosen().map_or(OFF, name_of_policy);
        self.policies().position(|(known, _)| known == name).unwrap_or(0)
    }
}
