//! Which guest memory should be large, and when: the decision layer of wideleaf.
//!
//! ```text
//!  sensors ──▶ Snapshot ──▶ Policy::plan(snapshot, now, budget) ──▶ Plan ──▶ actuators ──▶ Outcomes
//!     ▲                                                                          │
//!     └───────────── re-read the counters: did the mapping really change? ◀──────┘
//! ```
//!
//! This crate owns the vocabulary (units, [`Snapshot`], [`Action`], [`Outcome`]) because the layer that decides
//! defines the interface. The crate `memory` implements it against the kernel. This crate has no `std`, no
//! dependency, no `unsafe`, no clock and no randomness. Time arrives as a [`Moment`], so the same
//! snapshot always gives the same plan, on a live guest and on a recording.
//!
//! The unit of decision is the *window*, a naturally aligned 2 MiB range of guest-physical memory; 512 windows make
//! a *giant* (1 GiB). Policies say *promote* and *demote*; `memory` chooses the mechanism.
//!
//! Guarantees that every [`Policy`] keeps, checked by `tests/it/invariants.rs`:
//! - The plan never costs more than the budget grants, except when it begins with one giant page; the next
//!   intervals pay that debt.
//! - The plan never names a window that is not backed, and never names a window twice.
//! - The plan is a function of the arguments and of the policy's own past alone.

#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod account;
pub mod action;
mod bucket;
pub mod budget;
pub mod candidates;
mod demotions;
pub mod expectations;
pub mod geometry;
pub mod given_back;
mod huge_page_price;
pub mod locality;
pub mod market;
pub mod median;
pub mod node;
pub mod outcome;
pub mod page_set;
pub mod parameter_table;
pub mod parameters;
pub mod policy;
pub mod rank;
pub mod recording;
pub mod recovery;
pub mod reservations;
pub mod rotation;
pub mod sampled_pages;
pub mod snapshot;
pub mod units;
pub mod walk;
pub mod watermark;
pub mod window;
pub mod window_memory;
pub mod window_node;

pub use action::{Action, Plan, PlannedAction};
pub use budget::{Budget, BudgetLimits, Cost};
pub use geometry::GpaRange;
pub use given_back::GivenBackRules;
pub use huge_page_price::HugePagePrice;
pub use market::Bids;
pub use node::{CpuList, NodeId, NodeSet};
pub use outcome::{Outcome, OutcomeResult, Refusal, Skip};
pub use page_set::PageSet;
pub use parameters::{PolicyChoice, PolicyError};
pub use policy::Policy;
pub use reservations::{ReservationRules, Reservations};
pub use snapshot::{
    AccessHistory, Backing, GuestMapping, GuestProgress, HostMemory, HugePages, MappingStats, SampleQuality, Snapshot,
    VmId, VmSnapshot, WindowRow,
};
pub use units::{Bytes, Gfn, Gpa, Hva, Moment, PageSize, PerTenThousand, WindowIndex};
pub use window_node::{NodeOfVm, TouchedFrom, WindowNode};
