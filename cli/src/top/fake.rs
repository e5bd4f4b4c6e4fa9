//! A host without VMs, for tests.

use wideleaf_control::protocol::Settings;
use wideleaf_control::view::{Explanation, VmView, WindowMap};
use wideleaf_run::failure::Failure;

use crate::vm_source::processes::WithoutDaemon;
use crate::vm_source::{HostReport, Source};

/// Source of a host without VMs.
#[derive(Debug, Default)]
pub struct Fake {
    /// Whether the daemon no longer answers.
    pub is_gone: bool,
}

fn no_vm<T>(name: &str) -> Result<T, Failure> {
    Err(Failure::Usage(format!("no VM {name}")))
}

impl Source for Fake {
    fn host(&self) -> Result<HostReport, Failure> {
        if self.is_gone {
            return Err(Failure::Host("the daemon is gone".into()));
        }
        let source = WithoutDaemon::NotAsked.to_string();
        Ok(HostReport { source, daemon: None, vms: Vec::new(), notes: vec!["a note".into()] })
    }

    fn vm(&self, name: &str) -> Result<VmView, Failure> {
        no_vm(name)
    }

    fn explanation(&self, name: &str) -> Result<Explanation, Failure> {
        no_vm(name)
    }

    fn windows(&self, name: &str) -> Result<WindowMap, Failure> {
        no_vm(name)
    }

    fn set(&self, name: &str, _: Settings) -> Result<VmView, Failure> {
        no_vm(name)
    }
}
