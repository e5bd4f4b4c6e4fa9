//! Promotes windows that are nearly full already, fairly across VMs (Ingens, OSDI '16, threshold 90 %; the fairness
//! is the idle-memory tax of ESX, Waldspurger, OSDI '02, which Ingens applies to huge pages).
//!
//! ```text
//!   each VM's price of one more huge page = huge pages it has × (f + k (1 - f))       f: active share of its windows
//!   the cheapest VM gets the next one, then prices are compared again                 k = 1 / (1 - tax)
//! ```
//!
//! Without a tax every VM ends with the same number of huge pages; with 75 % a completely idle VM pays four times
//! the price for each. Ingens' own form rewards idleness when its penalty is at most one, so the original rule is
//! used. A VM without access samples counts as active.

use alloc::vec::Vec;

use super::{Needs, Policy};
use crate::action::Plan;
use crate::budget::Budget;
use crate::candidates::is_promotable;
use crate::expectations::Expectations;
use crate::outcome::Outcome;
use crate::parameter_table::{ParameterInfo, Parameters};
use crate::snapshot::{Snapshot, VmSnapshot};
use crate::units::{BASE_PAGES_PER_WINDOW, Moment, PerTenThousand};

/// Parameters that a user may set.
pub const PARAMETERS: &[ParameterInfo] = &[
    ParameterInfo::number(
        "threshold",
        90,
        (1, 100),
        "%",
        "share of a window's base pages that must be present (Ingens: 90, which is 460 of 512)",
    ),
    ParameterInfo::number(
        "idle_tax",
        75,
        (0, 99),
        "%",
        "tax on idle memory: huge pages of an idle VM count 1 / (1 - tax) times (ESX: 75)",
    ),
    ParameterInfo::number(
        "needs_access",
        0,
        (0, 1),
        "0 or 1",
        "1: promotes only windows touched in 3 of 4 samples (Ingens' deferred mode 2)",
    ),
];

/// Access rate from which on a window is hot: Ingens requires three quarters of the frequency's largest weight.
const HOT_RATE: PerTenThousand = PerTenThousand::new(7_500);

/// Promotes full windows in address order, VMs by price.
#[derive(Clone, Debug)]
pub struct Utilization {
    resident_min: u16,
    taxed_percent: u64,
    needs_access: bool,
    /// Whether the latest snapshot had several VMs: only then does the tax compare any.
    compares: bool,
    expectations: Expectations,
    accounts: Vec<Account>,
}

/// Huge pages of one VM, and its next candidate.
#[derive(Clone, Copy, Debug)]
struct Account {
    /// Index into the snapshot's VMs.
    vm: usize,
    /// Number of huge pages, those planned now included.
    huge: u64,
    /// Price of one huge page.
    tax: u64,
    /// Next row to examine.
    row: usize,
}

impl Account {
    fn price_of_one_more(&self) -> u64 {
        (self.huge + 1) * self.tax
    }
}

impl Utilization {
    /// A policy without accounts.
    pub fn new(parameters: &Parameters) -> Utilization {
        let resident_min = u64::from(BASE_PAGES_PER_WINDOW) * parameters.number("threshold") / 100;
        Utilization {
            resident_min: resident_min as u16,
            taxed_percent: parameters.number("idle_tax"),
            needs_access: parameters.number("needs_access") == 1,
            compares: false,
            expectations: Expectations::default(),
            accounts: Vec::new(),
        }
    }

    /// `f + k (1 - f)`, times a constant that keeps it an integer: 1 - tax and f are shares.
    fn tax(&self, active: PerTenThousand) -> u64 {
        let active = u64::from(active.get());
        active * (100 - self.taxed_percent) + (10_000 - active) * 100
    }

    fn open_account(&self, index: usize, vm: &VmSnapshot) -> Account {
        let huge = vm.backing.iter().filter(|backing| backing.is_large()).count() as u64;
        Account { vm: index, huge, tax: self.tax(active_share(vm)), row: 0 }
    }

    /// The next row of a VM that may be promoted.
    fn next_candidate(&self, vm: &VmSnapshot, from: usize, now: Moment) -> Option<usize> {
        (from..vm.len()).find(|row| {
            let is_hot = vm.access[*row].rate().is_some_and(|rate| rate >= HOT_RATE);
            vm.resident[*row] >= self.resident_min.max(1)
                && is_promotable(vm, *row, now)
                && (is_hot || !self.needs_access)
        })
    }
}

/// The share of a VM's sampled windows that were touched at the last sample; the whole if none was sampled.
fn active_share(vm: &VmSnapshot) -> PerTenThousand {
    let (mut sampled, mut touched) = (0, 0);
    for was_touched in vm.access.iter().filter_map(|access| access.was_touched()) {
        sampled += 1;
        touched += u64::from(was_touched);
    }
    if sampled == 0 { PerTenThousand::ALL } else { PerTenThousand::of(touched, sampled) }
}

impl Policy for Utilization {
    fn name(&self) -> &'static str {
        "utilization"
    }

    fn needs(&self) -> Needs {
        Needs { access: true, ..Needs::default() }
    }

    fn uses_access(&self, _vm: &VmSnapshot, _row: usize) -> bool {
        self.needs_access || (self.compares && self.taxed_percent > 0)
    }

    fn plan(&mut self, snapshot: &Snapshot, now: Moment, budget: &mut Budget, plan: &mut Plan) {
        self.compares = snapshot.vms.len() > 1;
        let mut accounts = core::mem::take(&mut self.accounts);
        accounts.clear();
        accounts.extend(snapshot.vms.iter().enumerate().map(|(index, vm)| self.open_account(index, vm)));
        while let Some(cheapest) = (0..accounts.len()).min_by_key(|at| accounts[*at].price_of_one_more()) {
            let account = &mut accounts[cheapest];
            let vm = &snapshot.vms[account.vm];
            let Some(row) = self.next_candidate(vm, account.row, now) else {
                accounts.remove(cheapest);
                continue;
            };
            if self.expectations.request_huge(vm, row, budget, plan).is_break() {
                break;
            }
            account.huge += 1;
            account.row = row + 1;
        }
        self.accounts = accounts;
    }

    fn learn(&mut self, outcome: &Outcome) {
        self.expectations.learn(outcome);
    }
}
