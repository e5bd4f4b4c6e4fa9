//! The KVM side of a run.

use std::sync::Arc;

use wideleaf_memory::{GuestRam, SecondLevel};
use wideleaf_policies::GpaRange;

use super::{Ended, RunSpec, native_layout};
use crate::failure::Failure;
use crate::session::Session;

pub(crate) struct Prepared {
    pub(crate) layout: Vec<GpaRange>,
    pub(crate) machine: Option<Plan>,
}

pub(crate) struct Plan;
pub(crate) struct Running;

impl Prepared {
    pub(crate) fn paging_name(&self) -> &'static str {
        "none"
    }
}

pub(crate) fn prepare(spec: &RunSpec) -> Result<Prepared, Failure> {
    Ok(Prepared { layout: native_layout(spec.memory)?, machine: None })
}

impl Plan {
    pub(crate) fn start(self, _: &RunSpec, _: Arc<GuestRam>, _: &Arc<Session>) -> Result<Running, Failure> {
        unreachable!()
    }
}
impl Running {
    pub(crate) fn second_level(&self) -> Arc<dyn SecondLevel> {
        unreachable!()
    }
    pub(crate) fn wait(self, _: &dyn Fn() -> Option<Ended>) -> Ended {
        unreachable!()
    }
}

pub fn why_no_kvm() -> Option<String> {
    Some("not yet".into())
}
pub fn paging_name() -> Result<&'static str, Failure> {
    Ok("none")
}
