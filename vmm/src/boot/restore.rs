//! A VM that continues from a snapshot: nothing is loaded, and nothing is written into its RAM, which may still be
//! filled while it runs.
//!
//! ```text
//!   checks: version, CPU, RAM, number of vCPUs and of devices         before KVM makes anything
//!   the VM with its memslots, interrupt controllers
//!   vCPUs: CPUID ─▶ frequency ─▶ time stamp counters of all, in step ─▶ registers ─▶ interrupt controllers ─▶ clock
//!   serial port, power button
//!   devices, in [`crate::Machine::start_restored`], once the sandbox is entered: their threads start there
//! ```
//!
//! Nothing of this touches RAM: the process has only this thread until it is in its sandbox, so no thread could answer
//! a fault. What needs RAM is left to the vCPUs' threads ([`crate::kvm::saved::LateState`]).
//!
//! The controllers follow the local APICs, because interrupts that wait in a controller go there at once. The devices
//! come last, because they interrupt.

use std::sync::Arc;

use kvm_bindings::CpuId;

use super::{BareVm, KeptState, Prepared, Stopwatch, timing, tsc_khz};
use crate::config::VmConfig;
use crate::devices::serial::SerialPort;
use crate::hardware::Hardware;
use crate::kvm::saved::tsc::continue_all;
use crate::kvm::{KvmSystem, Vcpu};
use crate::run_loop::OnReset;
use crate::state::{MachineState, RestoreError};
use crate::x86::cpuid;

/// Builds the VM except for its devices' work and its vCPUs' threads.
pub(crate) fn prepare(
    config: &VmConfig,
    state: &MachineState,
    Hardware { ram, output, devices, .. }: Hardware,
    watch: &mut Stopwatch,
) -> Result<Prepared, RestoreError> {
    if config.on_reset() == OnReset::Restart {
        return Err(RestoreError::OnReset);
    }
    state.check_fits(config, devices.len())?;
    let is_direct = state.is_direct();
    let mut bare = BareVm::create(config, ram, devices.len(), is_direct, watch)?;
    let vcpus = bare.create_vcpus(config)?;
    watch.lap("vcpus");

    let cpuids = set_cpuids(&bare, state, &vcpus, is_direct)?;
    set_frequency(&bare.system, state, &vcpus)?;
    let counters: Vec<_> = state.vcpus.iter().map(|vcpu| vcpu.tsc).collect();
    continue_all(&vcpus, &counters)?;
    let restored = vcpus.iter().zip(&state.vcpus).map(|(vcpu, saved)| saved.cpu.restore(vcpu));
    let late = restored.collect::<Result<_, _>>()?;
    if let Some(interrupts) = &state.interrupts {
        interrupts.put_back(&bare.vm)?;
    }
    bare.vm.set_clock_ns(state.clock_ns)?;
    watch.lap("registers");

    let msrs: Arc<[u32]> = bare.system.msrs()?.into();
    let tsc_hz = tsc_khz(&vcpus).map(|khz| u64::from(khz) * 1000);
    let entry_name = state.entry.name();
    let serial = SerialPort::restored(bare.take_serial_interrupt(), output, &state.serial);
    let serial = serial.ok_or(RestoreError::Damaged("the serial port"))?;
    let connected = bare.connect(serial, devices, is_direct)?;
    connected.power_button.restore(state.power)?;
    connected.bus.restore_counters(state.bus);
    watch.lap("devices");
    Ok(connected.prepared(vcpus, entry_name, tsc_hz, KeptState { msrs, cpuids, reboot: None, fresh: Vec::new(), late }))
}

/// Gives each vCPU the CPUID that the guest knows, where this host supports all of it.
fn set_cpuids(
    bare: &BareVm,
    state: &MachineState,
    vcpus: &[Vcpu],
    is_direct: bool,
) -> Result<Vec<CpuId>, RestoreError> {
    let timing = timing(&bare.system, is_direct, state.tsc_khz);
    let mut cpuids = Vec::with_capacity(vcpus.len());
    for (vcpu, saved) in vcpus.iter().zip(&state.vcpus) {
        let known = saved.cpuid()?;
        let here = cpuid::for_vcpu(&bare.supported, vcpu.index(), vcpus.len() as u32, timing)
            .map_err(super::BootError::Cpuid)?;
        cpuid::check_covers(&here, &known)?;
        vcpu.set_cpuid(&known)?;
        cpuids.push(known);
    }
    Ok(cpuids)
}

/// Lets the counters count as the guest knows them. Frequencies that differ by less than the error of measuring them
/// are equal for KVM (`tsc_tolerance_ppm` in arch/x86/kvm/x86.c).
fn set_frequency(system: &KvmSystem, state: &MachineState, vcpus: &[Vcpu]) -> Result<(), RestoreError> {
    const TOLERATED_PPM: u64 = 250;
    let (Some(saved), Some(here)) = (state.tsc_khz, tsc_khz(vcpus)) else { return Ok(()) };
    let ppm = u64::from(saved.abs_diff(here)) * 1_000_000 / u64::from(here);
    let other = || RestoreError::TscFrequency { saved_khz: saved, here_khz: here };
    if ppm > TOLERATED_PPM && !system.can_scale_tsc() {
        return Err(other());
    }
    if saved == here {
        return Ok(());
    }
    vcpus.iter().try_for_each(|vcpu| vcpu.set_tsc_khz(saved)).map_err(|_| other())
}
