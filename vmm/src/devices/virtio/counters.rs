//! Numbers that the thread of a device counts, and that anybody reads meanwhile.

use std::sync::atomic::{AtomicU64, Ordering};

/// One counter.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// So many more; how many there were before.
    pub fn add(&self, more: u64) -> u64 {
        self.0.fetch_add(more, Ordering::Relaxed)
    }

    /// So many until now.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A number or a length more, where nobody asks what there was before.
pub(super) fn add(counter: &Counter, more: usize) {
    counter.add(more as u64);
}

/// A struct of counters, and one of their values at an instant with the same fields.
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
            /// What was counted until now.
            pub fn statistics(&self) -> $values {
                $values { $($name: self.$name.get(),)* }
            }
        }
    };
}

pub(super) use counters;
