//! The configuration file: its keys, their defaults and its mistakes.
//!
//! ```text
//!   [defaults] ◀── [[vm]] with a pattern for the VM's name, in order ◀── settings of `wideleaf set` and `attach`
//! ```
//!
//! Every key has a default, so an empty file is a complete configuration. An unknown key is a mistake, because a
//! typing error that is ignored in silence is a setting that never takes effect.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use wideleaf_control::protocol::{SOCKET_PATH, Settings};
use wideleaf_control::view::{Guarantee, GuaranteeError};
use wideleaf_memory::block_supply::SupplyRules;
use wideleaf_memory::input_file::InputFile;
use wideleaf_memory::manager::{OutOfReach, OutOfReachError};
use wideleaf_policies::recovery::RecoveryLimits;
use wideleaf_policies::units::{gib, mib};
use wideleaf_policies::{BudgetLimits, Bytes, PerTenThousand};

mod pattern;
mod toml_text;
mod values;

pub use pattern::Pattern;
pub use values::{Automatic, Listen, PolicySetting, share_from};

/// Path of the configuration without `--config`.
pub const CONFIG_PATH: &str = "/etc/wideleaf/wideleafd.toml";

/// Upper bound on the file: thousands of VMs with a rule each.
const FILE_MAX: Bytes = mib(4);

/// The whole configuration.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Cost limits of actions, over all VMs.
    pub budget: BudgetConfig,
    /// Bounds on recoveries after events.
    pub recovery: RecoveryConfig,
    /// Watermarks for a shortage of memory on the host.
    pub host: HostConfig,
    /// Bounds on making free blocks of 2 MiB.
    pub supply: SupplyConfig,
    /// The control socket.
    pub socket: SocketConfig,
    /// The metrics endpoint.
    pub metrics: MetricsConfig,
    /// The state file.
    pub state: StateConfig,
    /// Guests that it attaches by itself.
    pub attach: AttachConfig,
    /// Settings of VMs without other ones.
    pub defaults: Defaults,
    /// Settings of VMs by name or flavor.
    pub vm: Vec<VmRule>,
}

/// Section `[budget]`: limits over all VMs.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct BudgetConfig {
    /// Guest memory that may be copied per second, in bytes.
    #[serde(deserialize_with = "values::size")]
    pub copy_per_second: Bytes,
    /// Share of one core, in ten thousandths.
    #[serde(deserialize_with = "values::share")]
    pub cpu_share: u32,
    /// Largest part of any 100 ms for which memory of one VM may be out of its reach.
    #[serde(deserialize_with = "values::out_of_reach")]
    pub out_of_reach: OutOfReach,
}

impl Default for BudgetConfig {
    /// The default of one manager: the host is one host however many VMs it runs.
    fn default() -> BudgetConfig {
        let limits = BudgetLimits::default();
        let (copy_per_second, cpu_share) = (limits.copy_per_second, limits.cpu_share.get());
        BudgetConfig { copy_per_second, cpu_share, out_of_reach: OutOfReach::default() }
    }
}

impl BudgetConfig {
    /// The limits as the managers' loops use them.
    pub fn limits(&self) -> BudgetLimits {
        BudgetLimits {
            copy_per_second: self.copy_per_second,
            cpu_share: PerTenThousand::new(self.cpu_share),
            ..BudgetLimits::default()
        }
    }
}

/// Section `[recovery]`: what was large before an event (a migration, a balloon …) becomes large again.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RecoveryConfig {
    /// Factor of a VM's part of the budget during a recovery.
    #[serde(deserialize_with = "values::burst")]
    pub burst: u32,
    /// Longest time of a recovery, from the end of the event on.
    #[serde(deserialize_with = "values::interval")]
    pub longest: Duration,
}

impl Default for RecoveryConfig {
    /// As for one manager.
    fn default() -> RecoveryConfig {
        let RecoveryLimits { burst, longest } = RecoveryLimits::default();
        RecoveryConfig { burst, longest }
    }
}

impl RecoveryConfig {
    /// The bounds as the managers' loops use them.
    pub fn limits(&self) -> RecoveryLimits {
        RecoveryLimits { burst: self.burst, longest: self.longest }
    }
}

/// Section `[host]`: watermarks of available memory.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HostConfig {
    /// Available memory below which no promotion may take more memory.
    #[serde(deserialize_with = "values::size")]
    pub low_free: Bytes,
    /// Available memory from which on promotions may take more again.
    #[serde(deserialize_with = "values::size")]
    pub high_free: Bytes,
}

impl Default for HostConfig {
    /// A collapse needs 2 MiB at a time, but a VM that grows needs hundreds. Half a gibibyte is what a host with a
    /// few small guests can take without swapping. The upper mark is twice that, so that the switch does not flap.
    fn default() -> HostConfig {
        HostConfig { low_free: mib(512), high_free: gib(1) }
    }
}

/// Section `[supply]`: free blocks of 2 MiB that are made while windows wait for them, and a reserve of them.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SupplyConfig {
    /// Share of one core, in ten thousandths; 0: none is made.
    #[serde(deserialize_with = "values::share")]
    pub cpu_share: u32,
    /// Number of free blocks below which more are made; also the size of the reserve.
    #[serde(deserialize_with = "values::blocks")]
    pub low_blocks: u64,
    /// Number of free blocks up to which they are made for windows that wait.
    #[serde(deserialize_with = "values::blocks")]
    pub high_blocks: u64,
    /// Time for which the reserve is kept after a window has waited; zero: no reserve is kept.
    #[serde(deserialize_with = "values::interval_or_zero")]
    pub reserve_for: Duration,
}

impl Default for SupplyConfig {
    /// As for one manager. Windows become hot in turns: five minutes are longer than a phase of most programs, and a
    /// host without new windows is left in peace afterwards.
    fn default() -> SupplyConfig {
        let SupplyRules { cpu, low, high, .. } = SupplyRules::default();
        let reserve_for = Duration::from_secs(300);
        SupplyConfig { cpu_share: cpu.get(), low_blocks: low, high_blocks: high, reserve_for }
    }
}

impl SupplyConfig {
    /// The bounds as the supply uses them.
    pub fn rules(&self) -> SupplyRules {
        SupplyRules {
            cpu: PerTenThousand::new(self.cpu_share),
            low: self.low_blocks,
            high: self.high_blocks,
            ..SupplyRules::default()
        }
    }
}

/// Section `[socket]`: the control socket.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SocketConfig {
    /// Path of the socket.
    pub path: PathBuf,
    /// Permission bits of the file: users that may connect may also read.
    #[serde(deserialize_with = "values::mode")]
    pub mode: u32,
    /// Group of the file, with members that may also make changes.
    pub group: Option<String>,
}

impl Default for SocketConfig {
    /// Owner and group: other users need not learn the names and places of a host's VMs.
    fn default() -> SocketConfig {
        SocketConfig { path: PathBuf::from(SOCKET_PATH), mode: 0o660, group: None }
    }
}

/// Section `[metrics]`: the metrics endpoint.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MetricsConfig {
    /// Address or file for Prometheus.
    pub listen: Listen,
    /// Permission bits of a Unix socket's file.
    #[serde(deserialize_with = "values::mode")]
    pub mode: u32,
}

impl Default for MetricsConfig {
    /// As for the control socket, for the same reason.
    fn default() -> MetricsConfig {
        MetricsConfig { listen: Listen::default(), mode: SocketConfig::default().mode }
    }
}

/// Section `[state]`: the state file.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StateConfig {
    /// Path of the file.
    pub path: PathBuf,
}

impl Default for StateConfig {
    /// The folder of systemd's `StateDirectory=wideleaf`.
    fn default() -> StateConfig {
        StateConfig { path: PathBuf::from("/var/lib/wideleaf/state.json") }
    }
}

/// Section `[attach]`: guests that the daemon takes by itself.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AttachConfig {
    /// Guests to attach.
    pub automatic: Automatic,
    /// Interval between scans of the host's processes for new guests.
    #[serde(deserialize_with = "values::interval")]
    pub interval: Duration,
}

impl Default for AttachConfig {
    /// libvirt's guests: an operator that installs the hook wants them managed, and no other guest is touched without
    /// being named. Every ten seconds: a guest that has just started touches its memory for longer than that.
    fn default() -> AttachConfig {
        AttachConfig { automatic: Automatic::Libvirt, interval: Duration::from_secs(10) }
    }
}

/// Section `[defaults]`: settings of VMs without other ones.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Defaults {
    /// Policy of the VM.
    pub policy: PolicySetting,
    /// Coverage that a VM should reach.
    #[serde(deserialize_with = "values::guarantee")]
    pub guarantee: Guarantee,
    /// Time that a VM may be below its guarantee before it is reported.
    #[serde(deserialize_with = "values::interval")]
    pub grace: Duration,
    /// Whether shared memory may be collapsed, which stops a guest for 15 to 30 ms a window.
    pub collapse_shared: bool,
}

impl Default for Defaults {
    /// `auto`, because it acts only where it pays. Half a minute, because a guest that boots is below any
    /// guarantee at first.
    fn default() -> Defaults {
        Defaults {
            policy: PolicySetting::default(),
            guarantee: Guarantee::BestEffort,
            grace: Duration::from_secs(30),
            collapse_shared: false,
        }
    }
}

/// Section `[[vm]]`: settings of VMs that match its patterns, all that it has. A later rule overrides an earlier one.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmRule {
    /// Pattern for the names. A rule without it has a pattern for the flavor.
    pub name: Option<Pattern>,
    /// Pattern for OpenStack Nova's flavor of an instance, which libvirt's hook reports. A VM without a flavor matches
    /// none.
    pub flavor: Option<Pattern>,
    /// Policy, as in [`Defaults`].
    pub policy: Option<PolicySetting>,
    /// Guarantee, as in [`Defaults`].
    #[serde(default, deserialize_with = "values::some_guarantee")]
    pub guarantee: Option<Guarantee>,
    /// Collapse of shared memory, as in [`Defaults`].
    pub collapse_shared: Option<bool>,
    /// A QMP socket with no other client.
    pub qmp: Option<PathBuf>,
    /// Weight of the VM in the sharing of the budget, and factor on its bids for huge pages.
    #[serde(default, deserialize_with = "values::weight")]
    pub weight: Option<u32>,
    /// Upper bound on its copies, in bytes per second.
    #[serde(default, deserialize_with = "values::some_size")]
    pub copy_per_second: Option<Bytes>,
    /// Part of the time out of reach, as in [`BudgetConfig`].
    #[serde(default, deserialize_with = "values::some_out_of_reach")]
    pub out_of_reach: Option<OutOfReach>,
    /// Upper bound on its bloat in bytes. At the bound no promotion may take more memory.
    #[serde(default, deserialize_with = "values::some_size")]
    pub bloat_max: Option<Bytes>,
}

/// Effective settings of one VM.
#[derive(Clone, Debug, PartialEq)]
pub struct Wanted {
    /// Policy of the VM.
    pub policy: PolicySetting,
    /// Coverage that it should reach.
    pub guarantee: Guarantee,
    /// Whether shared memory may be collapsed.
    pub collapse_shared: bool,
    /// A QMP socket for questions.
    pub qmp: Option<PathBuf>,
    /// Weight in the sharing of the budget, and factor on its bids for huge pages.
    pub weight: u32,
    /// Upper bound on its copies, in bytes per second.
    pub copy_per_second: Option<Bytes>,
    /// Largest part of any 100 ms for which its memory may be out of its reach.
    pub out_of_reach: OutOfReach,
    /// Upper bound on its bloat, in bytes.
    pub bloat_max: Option<Bytes>,
    /// Bounds on its recoveries.
    pub recovery: RecoveryLimits,
}

/// The configuration file, which is read at the start and at each reload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigFile {
    /// Path of the file.
    pub path: PathBuf,
    /// Whether the defaults hold without the file.
    pub may_be_missing: bool,
}

impl ConfigFile {
    /// The file at `path`. Only the one in the usual place may be missing: a file that was named must exist.
    pub fn at(path: PathBuf) -> ConfigFile {
        ConfigFile { may_be_missing: path == Path::new(CONFIG_PATH), path }
    }

    /// Reads the file as it is now.
    ///
    /// # Errors
    /// Same errors as [`Config::read`].
    pub fn read(&self) -> Result<Config, ConfigError> {
        match Config::read(&self.path) {
            Err(ConfigError::Unreadable { source, .. })
                if self.may_be_missing && source.kind() == io::ErrorKind::NotFound =>
            {
                Ok(Config::default())
            }
            read => read,
        }
    }
}

impl Config {
    /// Parses a file's text.
    ///
    /// # Errors
    /// The first mistake, with its line and column.
    pub fn parse(text: &str) -> Result<Config, Mistake> {
        let config: Config = toml::from_str(text).map_err(|error| Mistake::at(text, &error))?;
        config.contradiction().map_or(Ok(config), |what| Err(Mistake { place: None, what }))
    }

    /// Reads the file at `path`.
    ///
    /// # Errors
    /// The file cannot be read, or its first mistake.
    pub fn read(path: &Path) -> Result<Config, ConfigError> {
        let at = || path.to_owned();
        let text = InputFile::open_stream(path).and_then(|file| file.read_text(FILE_MAX));
        let text = text.map_err(|error| ConfigError::Unreadable { path: at(), source: error.into() })?;
        Config::parse(&text).map_err(|mistake| ConfigError::Mistaken { path: at(), mistake })
    }

    fn contradiction(&self) -> Option<String> {
        let HostConfig { low_free, high_free } = self.host;
        if high_free < low_free {
            return Some(format!(
                "host.high_free ({high_free}) is below host.low_free ({low_free}): make it at least as large"
            ));
        }
        let SupplyConfig { low_blocks, high_blocks, .. } = self.supply;
        if high_blocks < low_blocks {
            let what = format!("supply.high_blocks ({high_blocks}) is below supply.low_blocks ({low_blocks})");
            return Some(format!("{what}: make it at least as large"));
        }
        let unnamed = self.vm.iter().position(|rule| rule.name.is_none() && rule.flavor.is_none())?;
        Some(format!("[[vm]] number {} says of no VM that it is for it: add name or flavor", unnamed + 1))
    }

    /// Effective settings of a VM with that name, with Nova's flavor if it has one, and with `said`, its settings over
    /// the socket.
    ///
    /// # Errors
    /// The mistake in `said`.
    pub fn wanted(&self, name: &str, flavor: Option<&str>, said: &Settings) -> Result<Wanted, String> {
        let mut wanted = Wanted {
            policy: self.defaults.policy.clone(),
            guarantee: self.defaults.guarantee,
            collapse_shared: self.defaults.collapse_shared,
            qmp: None,
            weight: 1,
            copy_per_second: None,
            out_of_reach: self.budget.out_of_reach,
            bloat_max: None,
            recovery: self.recovery.limits(),
        };
        self.vm.iter().filter(|rule| rule.is_for(name, flavor)).for_each(|rule| rule.apply(&mut wanted));
        apply_said(said, &mut wanted)?;
        Ok(wanted)
    }
}

impl VmRule {
    fn is_for(&self, name: &str, flavor: Option<&str>) -> bool {
        let has_flavor = |pattern: &Pattern| flavor.is_some_and(|flavor| pattern.is_match(flavor));
        self.name.as_ref().is_none_or(|pattern| pattern.is_match(name)) && self.flavor.as_ref().is_none_or(has_flavor)
    }

    fn apply(&self, wanted: &mut Wanted) {
        set(&mut wanted.policy, self.policy.clone());
        set(&mut wanted.guarantee, self.guarantee);
        set(&mut wanted.collapse_shared, self.collapse_shared);
        set(&mut wanted.weight, self.weight);
        set(&mut wanted.out_of_reach, self.out_of_reach);
        wanted.qmp = self.qmp.clone().or(wanted.qmp.take());
        wanted.copy_per_second = self.copy_per_second.or(wanted.copy_per_second);
        wanted.bloat_max = self.bloat_max.or(wanted.bloat_max);
    }
}

fn apply_said(said: &Settings, wanted: &mut Wanted) -> Result<(), String> {
    let policy = said.policy.as_deref().map(PolicySetting::parse).transpose()?;
    let guarantee =
        said.guarantee.as_deref().map(str::parse).transpose().map_err(|error: GuaranteeError| error.to_string())?;
    let out_of_reach = said.out_of_reach.as_deref().map(str::parse).transpose();
    let out_of_reach = out_of_reach.map_err(|error: OutOfReachError| error.to_string())?;
    set(&mut wanted.policy, policy);
    set(&mut wanted.guarantee, guarantee);
    set(&mut wanted.out_of_reach, out_of_reach);
    set(&mut wanted.collapse_shared, said.collapse_shared);
    wanted.qmp = said.qmp.clone().or(wanted.qmp.take());
    Ok(())
}

fn set<T>(place: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *place = value;
    }
}

/// A mistake in a configuration's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistake {
    /// Line and column, from 1 on; `None` for a mistake of the whole.
    pub place: Option<(usize, usize)>,
    /// Description of the mistake.
    pub what: String,
}

impl Mistake {
    fn at(text: &str, error: &toml::de::Error) -> Mistake {
        let place = error.span().map(|span| {
            let before = text.get(..span.start).unwrap_or(text);
            let column = before.rsplit('\n').next().map_or(0, |line| line.chars().count());
            (before.matches('\n').count() + 1, column + 1)
        });
        Mistake { place, what: error.message().replace('\n', " ") }
    }
}

/// Reason for a missing configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Unreadable {
        /// Path of the file.
        path: PathBuf,
        /// Error from the kernel.
        source: std::io::Error,
    },
    /// The text has a mistake.
    #[error("{}{mistake}", path.display())]
    Mistaken {
        /// Path of the file.
        path: PathBuf,
        /// The mistake and its place.
        mistake: Mistake,
    },
}

impl std::fmt::Display for Mistake {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.place {
            Some((line, column)) => write!(f, ":{line}:{column}: {}", self.what),
            None => write!(f, ": {}", self.what),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn mistake(text: &str) -> String {
        Config::parse(text).expect_err(text).to_string()
    }

    #[test]
    fn an_empty_file_is_the_default() {
        assert_eq!(Config::parse("").expect("nothing is wrong"), Config::default());
        assert_eq!(Config::default().budget.limits(), BudgetLimits::default());
    }

    /// The example file that the package installs.
    const EXAMPLE: &str = include_str!("../../../packaging/wideleafd.toml");

    #[test]
    fn the_example_file_has_the_defaults() {
        assert_eq!(Config::parse(EXAMPLE).expect("nothing is wrong"), Config::default());
    }

    #[test]
    fn the_commented_keys_of_the_example_file_are_valid() {
        let said: String = EXAMPLE
            .lines()
            .map(|line| {
                line.strip_prefix("# ").filter(|rest| rest.starts_with("[[") || rest.contains(" = ")).unwrap_or(line)
            })
            .flat_map(|line| [line, "\n"])
            .collect();
        let config = Config::parse(&said).expect("nothing is wrong");
        assert_eq!((config.vm.len(), config.socket.group.as_deref()), (3, Some("wideleaf")));
        let of_flavor = config.wanted("instance-0000000e", Some("db.large"), &Settings::default());
        assert_eq!(of_flavor.expect("it makes sense").guarantee, Guarantee::Coverage(9_500));
        let wanted = config.wanted("web-1", None, &Settings::default()).expect("it makes sense");
        assert_eq!((wanted.weight, wanted.bloat_max, wanted.collapse_shared), (2, Some(mib(256)), true));
    }

    #[test]
    fn a_mistake_has_its_line_and_column() {
        assert!(mistake("[budget]\ncopy = 1\n").starts_with(":2:1: unknown field `copy`"));
        let text = mistake("[budget]\n  cpu_share = \"half\"\n");
        assert!(text.starts_with(":2:15: \"half\" is not a share"), "{text}");
        let text = mistake("[[vm]]\nname = \"a\"\npolicy = \"nope\"\n");
        assert!(text.starts_with(":3:10: there is no policy \"nope\"; choose one of never, "), "{text}");
        assert!(mistake("[socket]\nmode = \"rw\"").starts_with(":2:8: \"rw\" is not a mode"));
        assert!(mistake("[[vm]]\nname = \"a\"\nweight = 0").starts_with(":3:10: 0 is not a weight"));
        assert!(mistake("[recovery]\nburst = 0").starts_with(":2:9: 0 is not a burst"));
        for part in ["0%", "0.5%", "101%", "30"] {
            let of_all = mistake(&format!("[budget]\nout_of_reach = \"{part}\""));
            assert!(
                of_all.starts_with(&format!(":2:16: \"{part}\" is not a part of the time: write a number")),
                "{of_all}"
            );
            let of_one = mistake(&format!("[[vm]]\nname = \"a\"\nout_of_reach = \"{part}\""));
            assert!(of_one.starts_with(&format!(":3:16: \"{part}\" is not a part of the time")), "{of_one}");
        }
        assert!(mistake("[supply]\nlow_blocks = 0").starts_with(":2:14: 0 is not a number of blocks"));
        assert!(mistake("[supply]\nhigh_blocks = 257").starts_with(":2:15: 257 is not a number of blocks"));
        assert!(mistake("[attach]\nautomatic = \"some\"").starts_with(":2:13: "));
        assert!(mistake("[attach]\ninterval = \"10\"").starts_with(":2:12: \"10\" is not a time"));
        assert!(mistake("[metrics]\nlisten = \"here\"").starts_with(":2:10: \"here\" is not an address"));
    }

    #[test]
    fn a_policy_that_every_guest_would_refuse_is_a_mistake_with_the_same_reason_as_in_set() {
        for policy in ["at-fault", "reservation", "prealloc", "giant"] {
            for (text, place) in [
                (format!("[defaults]\npolicy = \"{policy}\"\n"), ":2:10: "),
                (format!("[[vm]]\nname = \"a\"\npolicy = \"{policy}\"\n"), ":3:10: "),
            ] {
                let mistake = mistake(&text);
                assert!(
                    mistake.starts_with(place) && mistake.contains("only for guests of `wideleaf run`"),
                    "{mistake}"
                );
            }
        }
    }

    #[test]
    fn watermarks_that_contradict_each_other_are_refused() {
        let text = mistake("[host]\nlow_free = \"2G\"\nhigh_free = \"1G\"\n");
        assert!(text.contains("high_free (1 GiB) is below host.low_free (2 GiB)"), "{text}");
        let text = mistake("[supply]\nlow_blocks = 33\n");
        assert!(text.contains("high_blocks (32) is below supply.low_blocks (33)"), "{text}");
    }

    #[test]
    fn a_later_rule_overrides_an_earlier_one_and_settings_override_all() {
        let text = "[defaults]\nguarantee = \"90%\"\n[[vm]]\nname = \"web*\"\npolicy = \"off\"\nweight = 2\n\
                    [[vm]]\nname = \"web-1\"\npolicy = \"greedy\"\nbloat_max = \"64M\"\n";
        let config = Config::parse(text).expect("all of it makes sense");
        let of = |name: &str, said: &Settings| config.wanted(name, None, said).expect("it is what the file says");
        let silent = Settings::default();
        assert_eq!(of("db", &silent).policy.to_string(), "auto");
        assert_eq!(of("db", &silent).guarantee, Guarantee::Coverage(9_000));
        assert_eq!((of("web-2", &silent).policy.to_string(), of("web-2", &silent).weight), ("off".into(), 2));
        let one = of("web-1", &silent);
        assert_eq!((one.policy.to_string(), one.weight, one.bloat_max), ("greedy".into(), 2, Some(mib(64))));
        let said = Settings { policy: Some("never".into()), guarantee: Some("best-effort".into()), ..silent };
        assert_eq!(of("web-1", &said).policy.to_string(), "never");
        assert_eq!(of("web-1", &said).guarantee, Guarantee::BestEffort);
        let said = Settings { policy: Some("nope".into()), ..Settings::default() };
        assert!(config.wanted("web-1", None, &said).expect_err("no such policy").contains("no policy \"nope\""));
    }

    #[test]
    fn the_part_of_the_time_out_of_reach_is_that_of_the_budget_of_a_rule_or_of_the_settings() {
        let text = "[budget]\nout_of_reach = \"20%\"\n[[vm]]\nname = \"web*\"\nout_of_reach = \"2.5%\"\n\
                    [[vm]]\nname = \"*\"\nweight = 2\n";
        let config = Config::parse(text).expect("all of it makes sense");
        let of = |name: &str, said: Option<&str>| {
            let said = Settings { out_of_reach: said.map(str::to_owned), ..Settings::default() };
            config.wanted(name, None, &said).map(|wanted| wanted.out_of_reach.to_string())
        };
        let parts = [of("db", None), of("web", None), of("web", Some("100%"))];
        assert_eq!(parts, ["20%", "2.50%", "100%"].map(|part| Ok(part.to_owned())));
        assert!(of("web", Some("0%")).expect_err("it is below 1 %").contains("write a number from 1 to 100"));
        assert_eq!(Config::default().budget.out_of_reach, OutOfReach::default());
    }

    #[test]
    fn a_rule_by_flavor_is_for_instances_of_that_flavor_alone() {
        let text = "[[vm]]\nflavor = \"db.*\"\npolicy = \"greedy\"\n\
                    [[vm]]\nname = \"instance-*\"\nflavor = \"db.large\"\nguarantee = \"95%\"\n";
        let config = Config::parse(text).expect("all of it makes sense");
        let of = |name: &str, flavor: Option<&str>| {
            let wanted = config.wanted(name, flavor, &Settings::default()).expect("it is what the file says");
            (wanted.policy.to_string(), wanted.guarantee)
        };
        let (best, most) = (Guarantee::BestEffort, Guarantee::Coverage(9_500));
        assert_eq!(of("instance-1", None), ("auto".into(), best), "no flavor");
        assert_eq!(of("instance-1", Some("web.large")), ("auto".into(), best), "another flavor");
        assert_eq!(of("instance-1", Some("db.small")), ("greedy".into(), best));
        assert_eq!(of("instance-1", Some("db.large")), ("greedy".into(), most), "both patterns match");
        assert_eq!(of("db-1", Some("db.large")), ("greedy".into(), best), "the name does not match");
    }

    #[test]
    fn only_the_file_in_the_usual_place_may_be_missing() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let named = ConfigFile::at(folder.path().join("wideleafd.toml"));
        let error = named.read().expect_err("a file that was named must exist");
        assert!(error.to_string().contains("wideleafd.toml: "), "{error}");
        let usual = ConfigFile { may_be_missing: true, ..named };
        assert_eq!(usual.read().expect("the defaults hold"), Config::default());
        std::fs::create_dir(&usual.path).expect("nothing is there");
        usual.read().expect_err("a file that is there and cannot be read is a mistake");
        assert!(ConfigFile::at(CONFIG_PATH.into()).may_be_missing);
    }

    #[test]
    fn a_rule_for_no_vm_is_a_mistake() {
        let text = mistake("[[vm]]\nname = \"a\"\n[[vm]]\nweight = 2\n");
        assert!(text.contains("[[vm]] number 2") && text.contains("add name or flavor"), "{text}");
    }

    proptest! {
        #[test]
        fn no_text_causes_a_panic(text in "[\\[\\]a-z_\"= \n0-9%*.]{0,200}") {
            let _ = Config::parse(&text).map_err(|mistake| mistake.to_string());
        }
    }
}
