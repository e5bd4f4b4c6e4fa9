//! The devices of a guest: specified, opened before the guest exists, and reported after its end.
//!
//! ```text
//!   [`DeviceSpec`] ─ open ─▶ [`Devices`] ─▶ the VM
//!                              └─ counters, drivers ─▶ [`WatchedDevices`] ─▶ control socket, [`DeviceReport`]s
//! ```

mod net;
mod vsock;

use std::collections::BTreeMap;
use std::fs::File;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use wideleaf_control::vm::{DeviceView, DriverView};
use wideleaf_memory::capabilities::Capability;
use wideleaf_policies::Bytes;
use wideleaf_vmm::devices::virtio::balloon::{Balloon, BalloonHandle};
use wideleaf_vmm::devices::virtio::block::{Block, DiskImage, DiskLocks};
use wideleaf_vmm::devices::virtio::rng::Entropy;
use wideleaf_vmm::devices::virtio::transport::{DriverSeen, DriverState};
use wideleaf_vmm::devices::virtio::{DEVICES_MAX, VirtioDevice};

use crate::failure::Failure;
use crate::front_end::FrontEnd;
use crate::guardian::path::HeldPath;
use crate::spec::DeviceSpec;

/// Name of the balloon; there is at most one.
const BALLOON: &str = "balloon";

/// Open devices, and the means to observe them after the VM has them.
#[derive(Default)]
pub struct Devices {
    devices: Vec<Box<dyn VirtioDevice>>,
    watched: WatchedDevices,
    held: Vec<HeldPath>,
}

/// Observable parts of devices after the VM has them.
#[derive(Default)]
pub struct WatchedDevices {
    devices: Vec<Watch>,
    balloon: Option<BalloonHandle>,
    /// Locks of the disks that the guest can write.
    locks: DiskLocks,
    /// State of the devices' drivers, in order; empty before the VM has the devices.
    drivers: Vec<DriverSeen>,
}

struct Watch {
    name: String,
    counters: Box<dyn Fn() -> BTreeMap<String, u64> + Send + Sync>,
}

/// Report of a device.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct DeviceReport {
    /// Kind of the device: `disk FILE`, `rng`.
    pub device: String,
    /// Whether a driver of the guest used it.
    pub has_driver: bool,
    /// Counters, by name.
    pub counters: BTreeMap<String, u64>,
}

impl Devices {
    /// Opens all devices of a guest with this amount of RAM. Taps and sockets that are created for them end with them.
    /// Disks of a guest that `arrives` are still locked by the run that it leaves ([`DiskLocks::take`]).
    ///
    /// # Errors
    /// [`Failure::Input`] for an unusable or busy disk, [`Failure::Usage`] for more devices than a VM can have.
    pub fn open(spec: &DeviceSpec, memory: Bytes, arrives: bool, front: &dyn FrontEnd) -> Result<Devices, Failure> {
        let DeviceSpec { disks, cards, vsock, balloon, has_rng } = spec;
        let single = [vsock.is_some(), balloon.is_some(), *has_rng].into_iter().filter(|is_wanted| *is_wanted).count();
        let count = disks.len() + cards.len() + single;
        if count > DEVICES_MAX {
            return Err(Failure::Usage(format!(
                "cannot give a guest {count} devices: it can have at most {DEVICES_MAX}"
            )));
        }
        let mut devices = Devices::default();
        let open = if arrives { DiskImage::open_arriving } else { DiskImage::open };
        let mut images = Vec::with_capacity(disks.len());
        for options in disks {
            let device = Block::new(open(options).map_err(|error| Failure::Input(error.to_string()))?);
            images.push(device.image());
            let counters = device.counters();
            devices.add(format!("disk {}", options.path.display()), device, move || by_name(&counters.statistics()));
        }
        devices.watched.locks = DiskLocks::of(images);
        net::check(cards)?;
        for options in cards {
            let (device, name) = net::open(options, front)?;
            let handle = device.handle();
            devices.add(name, device, move || by_name(&handle.counters()));
        }
        if let Some(options) = vsock {
            let (device, name, held) = vsock::open(options)?;
            devices.held.push(held);
            let handle = device.handle();
            devices.add(name, device, move || by_name(&handle.counters()));
        }
        if let Some(target) = balloon {
            let too_much =
                |error| Failure::Usage(format!("cannot use --balloon: {error}; use a smaller size, or more --memory"));
            let device = Balloon::new(memory, *target).map_err(too_much)?;
            let handle = device.handle();
            devices.watched.balloon = Some(handle.clone());
            devices.add(BALLOON.to_owned(), device, move || by_name(&handle.report()));
        }
        if *has_rng {
            let device = Entropy::default();
            let counters = device.counters();
            devices.add("rng".to_owned(), device, move || by_name(&counters.statistics()));
        }
        Ok(devices)
    }

    fn add(
        &mut self,
        name: String,
        device: impl VirtioDevice + 'static,
        counters: impl Fn() -> BTreeMap<String, u64> + Send + Sync + 'static,
    ) {
        self.devices.push(Box::new(device));
        self.watched.devices.push(Watch { name, counters: Box::new(counters) });
    }

    /// The devices for the VM, in the order in which the guest finds them; the observable rest; and their files,
    /// which are removed when these are dropped. That takes system calls, so the files must not belong to a thread
    /// that the sandbox denies them.
    pub fn hand_over(self) -> (Vec<Box<dyn VirtioDevice>>, WatchedDevices, Vec<HeldPath>) {
        (self.devices, self.watched, self.held)
    }
}

impl WatchedDevices {
    /// Locks of the disks that the guest can write.
    pub fn locks(&self) -> &DiskLocks {
        &self.locks
    }

    /// Adds the states of the drivers once the VM has the devices.
    pub fn driven_by(self, drivers: &[DriverSeen]) -> WatchedDevices {
        WatchedDevices { drivers: drivers.to_vec(), ..self }
    }

    /// Reports in the same order. A device that no driver used is logged, because its user would search for it in
    /// the guest without success.
    pub fn reports(&self) -> Vec<DeviceReport> {
        let report = |(Watch { name, counters }, driver): (&Watch, &DriverSeen)| {
            let has_driver = driver.has_worked();
            if !has_driver {
                tracing::warn!("no driver took {name}: {}", why_no_driver(driver.state()));
            }
            DeviceReport { device: name.clone(), has_driver, counters: counters() }
        };
        self.each().map(report).collect()
    }

    /// State of each device's driver, without counters.
    pub fn drivers(&self) -> Vec<DeviceView> {
        let view = |(watch, driver): (&Watch, &DriverSeen)| watch.view(driver, BTreeMap::new());
        self.each().map(view).collect()
    }

    /// All details of each device. The guest's memory statistics are requested anew, and come with a later answer.
    pub fn views(&self) -> Vec<DeviceView> {
        self.balloon.iter().for_each(BalloonHandle::ask_statistics);
        self.each().map(|(watch, driver)| watch.view(driver, (watch.counters)())).collect()
    }

    /// Sets the size of the balloon, and returns its state.
    ///
    /// # Errors
    /// One line: there is no balloon, or the RAM is too small.
    pub fn set_balloon(&self, target: Bytes) -> Result<DeviceView, String> {
        let balloon = self.balloon.as_ref().ok_or("this VM has no balloon: start it with --balloon")?;
        balloon.set_target(target).map_err(|error| format!("{error}; request at most {}", error.ram))?;
        let found = self.views().into_iter().find(|view| view.device == BALLOON);
        found.ok_or_else(|| "this VM's balloon is gone".to_owned())
    }

    /// Whether [`WatchedDevices::set_balloon`] finds a balloon.
    pub fn has_balloon(&self) -> bool {
        self.balloon.is_some()
    }

    fn each(&self) -> impl Iterator<Item = (&Watch, &DriverSeen)> {
        self.devices.iter().zip(&self.drivers)
    }
}

impl Watch {
    fn view(&self, driver: &DriverSeen, counters: BTreeMap<String, u64>) -> DeviceView {
        let driver = match driver.state() {
            DriverState::None => DriverView::None,
            DriverState::Found => DriverView::Found,
            DriverState::Probing => DriverView::Probing,
            DriverState::Ready => DriverView::Ready,
            DriverState::Failed => DriverView::Failed,
        };
        DeviceView { device: self.name.clone(), driver, counters }
    }
}

/// Reason why no driver ever worked with a device.
const fn why_no_driver(state: DriverState) -> &'static str {
    match state {
        DriverState::None => "the guest's kernel has no virtio-mmio (CONFIG_VIRTIO_MMIO), or no driver of it",
        DriverState::Found => "the guest's kernel found it and has no driver for it",
        DriverState::Probing | DriverState::Ready => "the guest ended before its driver was ready",
        DriverState::Failed => "its driver gave up; the guest's log says why",
    }
}

/// The doctor's rows for devices: their needs of the host beside files and sockets.
pub fn capabilities() -> Vec<Capability> {
    const TUN: &str = "/dev/net/tun";
    let tun = File::options().read(true).write(true).open(TUN).map(|_| TUN.to_owned());
    vec![
        Capability::new("tun", "--net is refused", tun.map_err(|error| format!("{TUN}: {error}"))),
        Capability::new("vsock", "", Ok("--vsock is served in this process: /dev/vhost-vsock is not needed".into())),
    ]
}

/// The whole numbers of a struct; those of a nested struct have both names.
fn by_name(counters: &impl Serialize) -> BTreeMap<String, u64> {
    fn flatten(value: &Value, name: &str, all: &mut BTreeMap<String, u64>) {
        match value {
            Value::Object(fields) => fields.iter().for_each(|(field, value)| {
                let name = if name.is_empty() { field.clone() } else { format!("{name}_{field}") };
                flatten(value, &name, all);
            }),
            value => all.extend(value.as_u64().map(|number| (name.to_owned(), number))),
        }
    }
    let mut all = BTreeMap::new();
    flatten(&serde_json::to_value(counters).expect("counters have names"), "", &mut all);
    all
}

#[cfg(test)]
mod tests {
    use wideleaf_policies::units::mib;

    use super::*;
    use crate::front_end::Quiet;

    #[test]
    fn a_balloon_larger_than_ram_is_one_line_with_the_remedy() {
        let args = DeviceSpec { balloon: Some(mib(65)), ..DeviceSpec::default() };
        let error = Devices::open(&args, mib(64), false, &Quiet).err().expect("too much");
        let line = "cannot use --balloon: a balloon of 65 MiB is more than the guest's RAM, 64 MiB; use a smaller \
            size, or more --memory";
        assert_eq!(error.to_string(), line);
    }

    #[test]
    fn a_balloons_counters_of_pages_have_both_names() {
        let balloon = Balloon::new(mib(64), mib(16)).expect("it fits");
        let counters = by_name(&balloon.handle().report());
        assert_eq!(counters["target_bytes"], 16 << 20);
        assert_eq!(counters["pages_inflated_at_most"], 0);
    }

    #[test]
    fn counters_are_read_by_name() {
        let counters = by_name(&Entropy::default().counters().statistics());
        assert_eq!(counters.len(), 4);
        assert_eq!(counters["requests"], 0);
    }
}
