//! The lists of [`calls`](super::calls) as filters of the kernel (seccomp(2),
//! Documentation/userspace-api/seccomp_filter.rst).
//!
//! ```text
//!   a call ─▶ the thread's filter ─┐
//!          ─▶ the process's filter ┼─▶ the strictest answer counts: SIGSYS before ENOSYS before yes
//!          ─▶ clone3: ENOSYS ──────┘
//! ```
//!
//! A filter can be added to a thread and never removed, so a thread may make only the calls that both lists allow.

use std::collections::BTreeMap;

use seccompiler::{BackendError, BpfProgram, SeccompAction, SeccompFilter, TargetArch, apply_filter};

use super::calls::{ThreadKind, rules};
use super::{SandboxConfig, SandboxError};

/// Architecture of the lists' numbers.
const ARCH: TargetArch = TargetArch::x86_64;

/// The filters of all kinds, compiled.
#[derive(Debug)]
pub(super) struct Filters {
    without_clone3: BpfProgram,
    of_kinds: Vec<(ThreadKind, BpfProgram)>,
}

impl Filters {
    /// Compiles the filters; none is active yet.
    pub(super) fn compile(config: &SandboxConfig) -> Result<Filters, SandboxError> {
        let compile = |kind| {
            let compiled = of_kind(kind, config).map_err(|source| SandboxError::Filter { kind, source })?;
            Ok::<_, SandboxError>((kind, compiled))
        };
        let of_kinds = ThreadKind::ALL.into_iter().map(compile).collect::<Result<_, _>>()?;
        let without_clone3 =
            without_clone3().map_err(|source| SandboxError::Filter { kind: ThreadKind::Process, source })?;
        Ok(Filters { without_clone3, of_kinds })
    }

    /// Activates the process's filter for the calling thread and all threads that it starts.
    pub(super) fn enter_process(&self) -> Result<(), SandboxError> {
        apply_filter(&self.without_clone3)?;
        self.enter_thread(ThreadKind::Process)
    }

    /// Activates the filter of `kind` for the calling thread and all threads that it starts, beside
    /// earlier filters.
    pub(super) fn enter_thread(&self, kind: ThreadKind) -> Result<(), SandboxError> {
        let (_, filter) = self.of_kinds.iter().find(|(of, _)| *of == kind).expect("every kind is compiled");
        Ok(apply_filter(filter)?)
    }
}

fn of_kind(kind: ThreadKind, config: &SandboxConfig) -> Result<BpfProgram, BackendError> {
    SeccompFilter::new(rules(kind, config)?, SeccompAction::Trap, SeccompAction::Allow, ARCH)?.try_into()
}

/// Answers `clone3(2)` with ENOSYS: its arguments are in memory, which a filter cannot read. The C library then
/// uses `clone(2)`, which has its flags in a register.
fn without_clone3() -> Result<BpfProgram, BackendError> {
    let rules = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    let no_such_call = SeccompAction::Errno(libc::ENOSYS as u32);
    SeccompFilter::new(rules, SeccompAction::Allow, no_such_call, ARCH)?.try_into()
}
