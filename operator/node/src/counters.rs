//! Counters of the agent, as Prometheus scrapes them.

use std::fmt;
use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

type Label = [(&'static str, &'static str); 1];
type Labels = [(&'static str, &'static str); 2];

/// Counters, and the registry that renders them.
pub struct Counters {
    registry: Registry,
    rounds: Family<Label, Counter>,
    guests: Family<Label, Gauge>,
    writes: Family<Labels, Counter>,
    watch_errors: Family<Label, Counter>,
    hooks: Family<Labels, Counter>,
    promotable: Family<Label, Gauge<f64, AtomicU64>>,
}

impl fmt::Debug for Counters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Counters").finish_non_exhaustive()
    }
}

impl Default for Counters {
    fn default() -> Counters {
        let mut registry = Registry::default();
        let rounds = Family::default();
        registry.register("wideleaf_node_rounds", "Rounds by their result", rounds.clone());
        let guests = Family::default();
        registry.register(
            "wideleaf_node_guests",
            "Guests of this node by the object that they belong to",
            guests.clone(),
        );
        let writes = Family::default();
        registry.register("wideleaf_node_writes", "Writes to the API server by object and result", writes.clone());
        let watch_errors = Family::default();
        registry.register("wideleaf_node_watch_errors", "Failures of watches by what is watched", watch_errors.clone());
        let hooks = Family::default();
        registry.register("wideleaf_node_hooks", "Calls of node hooks by hook point and result", hooks.clone());
        let promotable = Family::default();
        registry.register(
            "wideleaf_node_promotable_bytes",
            "Free memory that can become large pages, by state and size",
            promotable.clone(),
        );
        Counters { registry, rounds, guests, writes, watch_errors, hooks, promotable }
    }
}

impl Counters {
    /// Counts a round.
    pub fn round(&self, result: &'static str) {
        self.rounds.get_or_create(&[("result", result)]).inc();
    }

    /// Sets the number of guests that belong to objects of that kind.
    pub fn guests(&self, place: &'static str, number: usize) {
        self.guests.get_or_create(&[("place", place)]).set(i64::try_from(number).unwrap_or(i64::MAX));
    }

    /// Counts a write.
    pub fn write(&self, object: &'static str, result: &'static str) {
        self.writes.get_or_create(&[("object", object), ("result", result)]).inc();
    }

    /// Number of writes of that kind with that result.
    pub fn writes(&self, object: &'static str, result: &'static str) -> u64 {
        self.writes.get_or_create(&[("object", object), ("result", result)]).get()
    }

    /// Counts a failure of a watch.
    pub fn watch_error(&self, what: &'static str) {
        self.watch_errors.get_or_create(&[("what", what)]).inc();
    }

    /// Counts a call of a node hook.
    pub fn hook(&self, point: &'static str, result: &'static str) {
        self.hooks.get_or_create(&[("point", point), ("result", result)]).inc();
    }

    /// Sets a figure of the node, in bytes.
    pub fn promotable(&self, which: &'static str, bytes: u64) {
        self.promotable.get_or_create(&[("memory", which)]).set(bytes as f64);
    }

    /// All of them in OpenMetrics' text form.
    pub fn text(&self) -> String {
        let mut text = String::new();
        // A String takes everything.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_counter_is_in_the_text_with_its_labels() {
        let counters = Counters::default();
        counters.round("done");
        counters.guests("vmi", 2);
        counters.write("node", "done");
        counters.watch_error("pods");
        counters.hook("PreVMStart", "refused");
        counters.promotable("now_2m", 1 << 30);
        let text = counters.text();
        for row in [
            "wideleaf_node_rounds_total{result=\"done\"} 1",
            "wideleaf_node_guests{place=\"vmi\"} 2",
            "wideleaf_node_writes_total{object=\"node\",result=\"done\"} 1",
            "wideleaf_node_watch_errors_total{what=\"pods\"} 1",
            "wideleaf_node_hooks_total{point=\"PreVMStart\",result=\"refused\"} 1",
            "wideleaf_node_promotable_bytes{memory=\"now_2m\"} 1073741824",
        ] {
            assert!(text.contains(row), "{row} is not in\n{text}");
        }
        assert!(text.ends_with("# EOF\n"));
    }
}
