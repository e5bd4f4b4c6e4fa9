//! The settings of a run, as its report has them.

use wideleaf_memory::BackingConfig;

use crate::environment::Environment;
use crate::report::Setup;
use crate::spec::{RunSpec, Workload};

/// Settings of that run; without the cost of a TLB miss and the sandbox, which are known later.
pub fn setup(
    spec: &RunSpec,
    backing: BackingConfig,
    paging: &str,
    fallback: Option<String>,
    environment: &Environment,
) -> Setup {
    Setup {
        workload: spec.workload_name(),
        cmdline: spec.cmdline.clone(),
        class: spec.class().map(|class| class.to_string()),
        mode: if spec.is_native { "native" } else { "guest" }.into(),
        paging: paging.into(),
        evidence: evidence(paging, environment.is_virtual).into(),
        memory_bytes: spec.memory.get(),
        memory_needed_bytes: spec.memory_needed_bytes(),
        vcpus: u32::from(spec.vcpus),
        backing: backing.kind().name().into(),
        host_page: backing.start_page().name().into(),
        guest_page: match (&spec.workload, spec.is_native) {
            (_, true) => Some("none".to_owned()),
            (Workload::Kernel(_), false) => Some(spec.guest_page.name().to_owned()),
            (Workload::Image(_), false) => None,
        },
        policy: spec.policy.to_string(),
        out_of_reach: spec.out_of_reach.map(|part| part.to_string()),
        fallback,
        walk_cost: String::new(),
        sandbox: None,
    }
}

/// What a speed that was measured under this paging is evidence of.
pub fn evidence(paging: &str, is_virtual: bool) -> &'static str {
    match (paging, is_virtual) {
        ("shadow", _) => "shadow paging: mapping sizes are real, but speeds say nothing about EPT/NPT",
        ("none", true) => "no second level of wideleaf, but this host is itself a VM: not a one-dimensional baseline",
        ("none", false) => "no second level: a one-dimensional baseline",
        (_, true) => "two-dimensional paging inside a VM: evidence of function only, not of hardware speed",
        (_, false) => "two-dimensional paging in hardware",
    }
}
