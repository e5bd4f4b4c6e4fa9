//! The machines the simulator knows, one file each. A new one is a file and an entry of this list.

use super::machine::Machine;

mod k8;
mod skylake_sp;

pub(super) static ALL: &[Machine] = &[k8::K8, skylake_sp::SKYLAKE_SP];
