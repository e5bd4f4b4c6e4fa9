//! Counters that a device's thread writes, and that other threads read at any time.

use std::sync::atomic::{AtomicU64, Ordering};

/// One counter of events or bytes.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `more`, and returns the previous value.
    pub fn add(&self, more: u64) -> u64 {
        self.0.fetch_add(more, Ordering::Relaxed)
    }

    /// Value of the counter now.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Adds a number or a length, where the caller does not need the previous value.
pub(super) fn add(counter: &Counter, more: usize) {
    counter.add(more as u64);
}

/// A struct of counters, and one of their values at one moment with the same fields.
macro_rules! counters {
    (
        $(#[$of_counters:meta])* counters $counters:ident,
        $(#[$of_values:meta])* values $values:ident: $($(#[$doc:meta])* $name:ident,)*
    ) => {
        $(#[$of_counters])*
        #[derive(Debug, Default)]
        pub struct $counters {
            $($(#[$doc])* pub $name: $crate::devices::virtio::counters::Counter,)*
        }

        $(#[$of_values])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
        pub struct $values {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl $counters {
            /// Values of the counters now.
            pub fn statistics(&self) -> $values {
                $values { $($name: self.$name.get(),)* }
            }
        }
    };
}

pub(super) use counters;
