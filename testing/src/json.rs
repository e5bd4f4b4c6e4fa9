//! Checks JSON results as a program reads them: each number's name has a unit, or is known as a count.

use serde_json::Value;

/// Names of all numbers in `value` without a unit or a sign that they are counts.
pub fn numbers_without_unit(name: &str, value: &Value) -> Vec<String> {
    const UNITS: [&str; 10] = ["bytes", "_kib", "_gib_per_s", "_per_s", "seconds", "_s", "_ms", "_us", "_ns", "_bp"];
    // `value` has a `unit` beside it, the load average has no unit, an address is a place; the rest are counts.
    const WITHOUT: &[&str] = &[
        "value",
        "load_1m",
        "address",
        "vcpus",
        "vcpu",
        "cpus",
        "count",
        "errors",
        "checked",
        "units",
        "windows",
        "windows_host_large",
        "resets",
        "ticks",
        "ticks_paused",
        "ticks_without",
        "latest_windows",
        "budget_refusals",
        "frames",
        "frames_lost",
        "samples",
        "waits",
        "claimed",
        "not_run",
        "pages_4k",
        "pages_2m",
        "pages_1g",
        "outcomes",
        "sensor_failures",
        "log2_words",
        "cycles",
        "walks",
        "walk_cycles",
        "second_level_walk_cycles",
    ];
    match value {
        Value::Object(fields) => {
            let named = fields.iter().map(|(field, value)| match name {
                "outcomes" | "sensor_failures" => (name, value), // counts by name
                _ => (field.as_str(), value),
            });
            named.flat_map(|(name, value)| numbers_without_unit(name, value)).collect()
        }
        // The documentation of the field names the columns of a series' rows.
        Value::Array(rows) => {
            let objects = rows.iter().filter(|row| row.is_object());
            objects.flat_map(|row| numbers_without_unit(name, row)).collect()
        }
        Value::Number(_) if !WITHOUT.contains(&name) && !UNITS.iter().any(|unit| name.ends_with(unit)) => {
            vec![name.to_owned()]
        }
        _ => Vec::new(),
    }
}
