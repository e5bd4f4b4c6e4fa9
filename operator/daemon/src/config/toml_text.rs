//! The configuration as the text of a file: `wideleafd --check` prints it, and it reads as the same configuration
//! again.

use std::fmt::{Display, Write as _};
use std::time::Duration;

use wideleaf_policies::Bytes;

use super::{
    AttachConfig, Automatic, BudgetConfig, Config, Defaults, HostConfig, MetricsConfig, RecoveryConfig, SocketConfig,
    StateConfig, SupplyConfig, VmRule,
};

impl Config {
    /// The whole configuration as TOML; unset keys are left out.
    pub fn to_toml(&self) -> String {
        // Destructured, so that a new key cannot be forgotten here.
        let Config { budget, recovery, host, supply, socket, metrics, state, attach, defaults, vm } = self;
        let BudgetConfig { copy_per_second, cpu_share, out_of_reach } = budget;
        let RecoveryConfig { burst, longest } = recovery;
        let HostConfig { low_free, high_free } = host;
        let SupplyConfig { cpu_share: supply_share, low_blocks, high_blocks, reserve_for } = supply;
        let SocketConfig { path, mode, group } = socket;
        let MetricsConfig { listen, mode: metrics_mode } = metrics;
        let StateConfig { path: state_path } = state;
        let AttachConfig { automatic, interval } = attach;
        let Defaults { policy, guarantee, grace, collapse_shared } = defaults;
        let mut text = TomlText::default();
        text.section("[budget]");
        text.key("copy_per_second", quoted(size(*copy_per_second)));
        text.key("cpu_share", quoted(share(*cpu_share)));
        text.key("out_of_reach", quoted(out_of_reach));
        text.section("[recovery]");
        text.key("burst", burst);
        text.key("longest", quoted(time(*longest)));
        text.section("[host]");
        text.key("low_free", quoted(size(*low_free)));
        text.key("high_free", quoted(size(*high_free)));
        text.section("[supply]");
        text.key("cpu_share", quoted(share(*supply_share)));
        text.key("low_blocks", low_blocks);
        text.key("high_blocks", high_blocks);
        text.key("reserve_for", quoted(time(*reserve_for)));
        text.section("[socket]");
        text.key("path", quoted(path.display()));
        text.key("mode", quoted(format!("{mode:04o}")));
        text.key_if("group", group.as_ref().map(quoted));
        text.section("[metrics]");
        text.key("listen", quoted(listen));
        text.key("mode", quoted(format!("{metrics_mode:04o}")));
        text.section("[state]");
        text.key("path", quoted(state_path.display()));
        text.section("[attach]");
        text.key("automatic", names(automatic));
        text.key("interval", quoted(time(*interval)));
        text.section("[defaults]");
        text.key("policy", quoted(policy));
        text.key("guarantee", quoted(guarantee));
        text.key("grace", quoted(time(*grace)));
        text.key("collapse_shared", collapse_shared);
        vm.iter().for_each(|rule| text.rule(rule));
        text.0
    }
}

#[derive(Default)]
struct TomlText(String);

impl TomlText {
    fn section(&mut self, header: &str) {
        let gap = if self.0.is_empty() { "" } else { "\n" };
        self.write(format_args!("{gap}{header}\n"));
    }

    fn key(&mut self, name: &str, value: impl Display) {
        self.write(format_args!("{name} = {value}\n"));
    }

    fn key_if(&mut self, name: &str, value: Option<impl Display>) {
        if let Some(value) = value {
            self.key(name, value);
        }
    }

    fn rule(&mut self, rule: &VmRule) {
        let VmRule {
            name,
            flavor,
            policy,
            guarantee,
            collapse_shared,
            qmp,
            weight,
            copy_per_second,
            out_of_reach,
            bloat_max,
        } = rule;
        self.section("[[vm]]");
        self.key_if("name", name.as_ref().map(quoted));
        self.key_if("flavor", flavor.as_ref().map(quoted));
        self.key_if("policy", policy.as_ref().map(quoted));
        self.key_if("guarantee", guarantee.as_ref().map(quoted));
        self.key_if("collapse_shared", *collapse_shared);
        self.key_if("qmp", qmp.as_ref().map(|path| quoted(path.display())));
        self.key_if("weight", *weight);
        self.key_if("copy_per_second", copy_per_second.map(|bytes| quoted(size(bytes))));
        self.key_if("out_of_reach", out_of_reach.map(quoted));
        self.key_if("bloat_max", bloat_max.map(|bytes| quoted(size(bytes))));
    }

    fn write(&mut self, text: std::fmt::Arguments<'_>) {
        self.0.write_fmt(text).expect("writing to a String does not fail");
    }
}

/// With the escapes that TOML needs.
fn quoted(value: impl Display) -> toml::Value {
    toml::Value::String(value.to_string())
}

fn names(automatic: &Automatic) -> toml::Value {
    match automatic {
        Automatic::Libvirt => quoted("libvirt"),
        Automatic::None => quoted("none"),
        Automatic::All => quoted("all"),
        Automatic::Named(patterns) => toml::Value::Array(patterns.iter().map(quoted).collect()),
    }
}

/// The size in the largest exact unit.
fn size(bytes: Bytes) -> String {
    let units = [(1 << 40, "T"), (1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")];
    let unit = units.into_iter().find(|(unit, _)| bytes.get() >= *unit && bytes.get().is_multiple_of(*unit));
    unit.map_or_else(|| bytes.get().to_string(), |(unit, name)| format!("{}{name}", bytes.get() / unit))
}

fn share(ten_thousandths: u32) -> String {
    match (ten_thousandths / 100, ten_thousandths % 100) {
        (whole, 0) => format!("{whole}%"),
        (whole, rest) => format!("{whole}.{rest:02}%"),
    }
}

fn time(time: Duration) -> String {
    format!("{}s", time.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use wideleaf_memory::manager::OutOfReach;
    use wideleaf_policies::PerTenThousand;

    fn reads_the_same(config: &Config) {
        let text = config.to_toml();
        assert_eq!(Config::parse(&text).as_ref(), Ok(config), "{text}");
    }

    #[test]
    fn the_printed_text_reads_as_the_same_configuration() {
        reads_the_same(&Config::default());
        let all = r#"
            [socket]
            path = "/run/a \"b\" \\ c"
            mode = "0600"
            group = "ops"
            [metrics]
            listen = "unix:/run/metrics.sock"
            mode = "0666"
            [budget]
            out_of_reach = "12.5%"
            [supply]
            low_blocks = 3
            high_blocks = 100
            reserve_for = "0s"
            [attach]
            automatic = ["web*", "it's \"db\""]
            interval = "5m"
            [defaults]
            policy = "thp:scan_sleep_ms=100,max_ptes_none=64"
            guarantee = "99.5%"
            collapse_shared = true
            [[vm]]
            name = "web?"
            policy = "off"
            guarantee = "bestEffort"
            collapse_shared = false
            qmp = "/run/web.qmp"
            weight = 3
            copy_per_second = "500M"
            out_of_reach = "100%"
            bloat_max = "1536K"
            [[vm]]
            name = "*"
            [[vm]]
            flavor = "m1.*"
        "#;
        reads_the_same(&Config::parse(all).expect("nothing is wrong"));
    }

    proptest! {
        #[test]
        fn any_figure_reads_as_the_same(
            copy: u64, low: u64, share in 0..=10_000_u32, part in 100..=10_000_u32, seconds in 1..=86_400_u64,
            unit in 0..5_u32,
        ) {
            let copy_per_second = Bytes::new((copy >> (10 * unit)) << (10 * unit));
            let low_free = Bytes::new(low);
            let out_of_reach = OutOfReach::nearest_to(PerTenThousand::new(part));
            let budget = BudgetConfig { copy_per_second, cpu_share: share, out_of_reach };
            let host = HostConfig { low_free, high_free: Bytes::new(u64::MAX) };
            let attach = AttachConfig { interval: Duration::from_secs(seconds), ..AttachConfig::default() };
            let config = Config { budget, host, attach, ..Config::default() };
            reads_the_same(&config);
        }
    }
}
