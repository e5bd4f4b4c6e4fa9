//! Observations of guest RAM, of KVM's totals and of this process, made where the guest marks the begin or the end of a
//! phase, and at the end. Each takes a look at all windows.

use wideleaf_memory::sensors::host_backing::{HostBackingSensor, WindowBacking};
use wideleaf_memory::sensors::page_tables::table_memory;
use wideleaf_memory::sensors::smaps::resident_memory;
use wideleaf_memory::{BackingKind, Host as _};
use wideleaf_policies::account::HostBacking;
use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;
use wideleaf_policies::{Bytes, GpaRange, PageSize};

use super::{Attached, Session};
use crate::report::{Counters, RamAtEnd, Region};

impl Session {
    /// Observes guest RAM once more before the manager and the VM are gone: when the guest has ended, or is no
    /// longer waited for. A phase without an `end` line gets its counters now.
    pub fn at_end(&self) -> Option<RamAtEnd> {
        let attached = self.attached.get()?;
        let named = self.log().regions.clone();
        let look = || {
            let regions: Vec<_> = named.iter().map(|(name, range)| self.region(name, *range)).collect();
            (self.counters(attached), regions)
        };
        let (counters, regions) = attached.in_place(look);
        let mut log = self.log();
        let mut is_cut_off = log.phases.is_empty();
        for open in log.phases.iter_mut().filter(|phase| phase.at_end.is_none()) {
            (open.at_end, open.is_complete, is_cut_off) = (Some(counters), false, true);
        }
        if is_cut_off {
            log.regions_seen = regions;
        }
        Some(RamAtEnd::new(counters, self.ram.bytes().get()))
    }

    /// Counters of guest RAM now, without those of page tables and KVM.
    pub fn counters_now(&self) -> Counters {
        Counters::new(self.ram.claims().steadily(|| self.host_backing()), None)
    }

    pub(super) fn counters(&self, attached: &Attached) -> Counters {
        let host = self.ram.claims().steadily(|| self.host_backing());
        let kvm = attached.second_level.as_ref().and_then(|kvm| kvm.mapping_stats().ok());
        Counters::new(host, kvm).with_tables(table_memory(self.host.as_ref()))
    }

    fn host_backing(&self) -> HostBacking {
        let mut host = HostBacking::default();
        let mut sensor = HostBackingSensor::default();
        for range in self.ram.ranges() {
            match sensor.sample(self.host.as_ref(), *range, self.fixed_page()) {
                Err(error) => tracing::warn!("host backing: {error}"),
                Ok(rows) => {
                    for row in rows.map(|row| self.ram.claims().known(row)) {
                        host.add_window(row.resident, row.backing);
                    }
                }
            }
        }
        host
    }

    pub(super) fn region(&self, name: &str, range: GpaRange) -> Region {
        let windows = range.windows().len() as u64;
        let windows_host_large = self.ram.claims().steadily(|| self.windows_host_large(range));
        let (address, bytes) = (range.start().get(), range.bytes().get());
        Region { name: name.to_owned(), address, bytes, windows, windows_host_large }
    }

    fn windows_host_large(&self, range: GpaRange) -> u64 {
        let mut windows = 0;
        let mut sensor = HostBackingSensor::default();
        for part in self.ram.ranges().iter().filter_map(|ram| ram.part(range)) {
            if let Ok(rows) = sensor.sample(self.host.as_ref(), part, self.fixed_page()) {
                let is_whole = |row: &WindowBacking| row.backing.is_large() && row.resident == BASE_PAGES_PER_WINDOW;
                windows += rows.filter(is_whole).count() as u64;
            }
        }
        windows
    }

    pub(super) fn resident_beyond_guest_ram(&self) -> Option<Bytes> {
        let smaps = self.host.read_text("/proc/self/smaps").ok()?;
        let ram: Vec<_> = self.ram.ranges().iter().map(|range| (range.hva, range.gpa.bytes())).collect();
        match resident_memory(&smaps, &ram) {
            Ok(memory) => Some(memory.beyond_guest_ram),
            Err(error) => {
                tracing::warn!("cannot read how much memory this process has beside its guest: {error}");
                None
            }
        }
    }

    fn fixed_page(&self) -> Option<PageSize> {
        let backing = self.ram.backing();
        (backing.kind() == BackingKind::Hugetlb).then(|| backing.start_page())
    }
}
