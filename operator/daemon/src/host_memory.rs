//! Whether the host is short of memory: available bytes against two marks, so that the state does not flap.
//!
//! ```text
//!   available   low_free        high_free
//!   ────────────┼───────────────┼──────▶
//!      short    │   unchanged   │  enough
//! ```

use wideleaf_policies::Bytes;

use crate::config::HostConfig;

/// Latest measurement and its result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostMemoryWatch {
    /// Available memory according to the kernel's estimate (`MemAvailable`), in bytes; zero before
    /// the first measurement.
    pub available: Bytes,
    /// Whether that is too little.
    pub is_short: bool,
}

impl HostMemoryWatch {
    /// Takes a measurement into account. Without one, the state stays.
    pub fn update(&mut self, available: Option<Bytes>, marks: &HostConfig) {
        let Some(available) = available else { return };
        self.available = available;
        self.is_short = available < if self.is_short { marks.high_free } else { marks.low_free };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wideleaf_policies::units::mib;

    #[test]
    fn it_is_short_below_one_mark_until_it_is_above_the_other() {
        let marks = HostConfig { low_free: mib(100), high_free: mib(200) };
        let mut watch = HostMemoryWatch::default();
        let mut seen = |available| {
            watch.update(available, &marks);
            watch.is_short
        };
        assert_eq!(
            [150, 100, 99, 100, 199, 200, 100].map(|n| seen(Some(mib(n)))),
            [false, false, true, true, true, false, false]
        );
        assert!(seen(Some(mib(1))) && seen(None));
    }
}
