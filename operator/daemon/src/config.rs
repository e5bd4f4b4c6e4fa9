//! The configuration file: what an operator may say, what holds where nothing is said, and what is wrong with what was said.
//!
//! ```text
//!   [defaults] ◀── [[vm]] whose pattern is the VM's name, first to last ◀── what `wideleaf set` and `attach` said
//! ```
//!
//! Every key has a default, so that an empty file is a whole configuration. A key that does not exist is a mistake: a typing error that
//! is passed over in silence is a setting that never was.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use wideleaf_control::protocol::{SOCKET_PATH, Settings};
use wideleaf_control::view::{Guarantee, GuaranteeError};
use wideleaf_memory::input_file::InputFile;
use wideleaf_policies::units::{gib, mib};
use wideleaf_policies::{BudgetLimits, Bytes};

mod pattern;
mod values;
mod words;

pub use pattern::Pattern;
pub use values::{Automatic, Listen, PolicySetting, share_from};

/// Where the configuration is unless `--config` says otherwise.
pub const CONFIG_PATH: &str = "/etc/wideleaf/wideleafd.toml";

/// The longest configuration that is read: thousands of VMs with a rule each.
const FILE_MAX: Bytes = mib(4);

/// All that can be configured.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// What actions may cost, over all VMs.
    pub budget: BudgetConfig,
    /// When the host is short of memory.
    pub host: HostConfig,
    /// Where and for whom the daemon listens.
    pub socket: SocketConfig,
    /// Where it is scraped.
    pub metrics: MetricsConfig,
    /// Where it remembers.
    pub state: StateConfig,
    /// Which guests it takes by itself.
    pub attach: AttachConfig,
    /// What holds for a VM of which nothing else is said.
    pub defaults: Defaults,
    /// What holds for VMs by name.
    pub vm: Vec<VmRule>,
}

/// `[budget]`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct BudgetConfig {
    /// Guest memory copied per second.
    #[serde(deserialize_with = "values::size")]
    pub copy_per_second: Bytes,
    /// Share of one core, in ten thousandths.
    #[serde(deserialize_with = "values::share")]
    pub cpu_share: u32,
}

impl Default for BudgetConfig {
    /// What one manager alone has by default: the host is one host however many VMs it runs.
    fn default() -> BudgetConfig {
        let limits = BudgetLimits::default();
        BudgetConfig { copy_per_second: limits.copy_per_second, cpu_share: limits.cpu_share.get() }
    }
}

impl BudgetConfig {
    /// As the loops know it.
    pub fn limits(&self) -> BudgetLimits {
        BudgetLimits {
            copy_per_second: self.copy_per_second,
            cpu_share: wideleaf_policies::PerTenThousand::new(self.cpu_share),
            ..BudgetLimits::default()
        }
    }
}

/// `[host]`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HostConfig {
    /// Below this much available memory nothing is promoted that takes more.
    #[serde(deserialize_with = "values::size")]
    pub low_free: Bytes,
    /// From this much on it is again.
    #[serde(deserialize_with = "values::size")]
    pub high_free: Bytes,
}

impl Default for HostConfig {
    /// A collapse needs 2 MiB at a time, but a VM that grows needs hundreds: half a gibibyte is what a host with a few small guests
    /// can take without swapping. Twice that to go on, so that the switch does not flap.
    fn default() -> HostConfig {
        HostConfig { low_free: mib(512), high_free: gib(1) }
    }
}

/// `[socket]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SocketConfig {
    /// Its path.
    pub path: PathBuf,
    /// Who may connect, and so read: the file's permission bits.
    #[serde(deserialize_with = "values::mode")]
    pub mode: u32,
    /// The group of the file, whose members may also change things.
    pub group: Option<String>,
}

impl Default for SocketConfig {
    /// Owner and group: where the VMs of a host are and how they are named is not everybody's business.
    fn default() -> SocketConfig {
        SocketConfig { path: PathBuf::from(SOCKET_PATH), mode: 0o660, group: None }
    }
}

/// `[metrics]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MetricsConfig {
    /// Where to listen for Prometheus.
    pub listen: Listen,
    /// Who may connect where that is a file: its permission bits.
    #[serde(deserialize_with = "values::mode")]
    pub mode: u32,
}

impl Default for MetricsConfig {
    /// As the control socket, for the same reason.
    fn default() -> MetricsConfig {
        MetricsConfig { listen: Listen::default(), mode: SocketConfig::default().mode }
    }
}

/// `[state]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StateConfig {
    /// The file that outlives the daemon.
    pub path: PathBuf,
}

impl Default for StateConfig {
    /// systemd's `StateDirectory=wideleaf`.
    fn default() -> StateConfig {
        StateConfig { path: PathBuf::from("/var/lib/wideleaf/state.json") }
    }
}

/// `[attach]`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AttachConfig {
    /// Which.
    pub automatic: Automatic,
    /// How often the host's processes are looked through for new ones.
    #[serde(deserialize_with = "values::interval")]
    pub interval: Duration,
}

impl Default for AttachConfig {
    /// libvirt's: who installs the hook wants its guests looked after, and nothing happens to a guest that nobody named. Every ten
    /// seconds: a guest that has just started touches its memory for longer than that.
    fn default() -> AttachConfig {
        AttachConfig { automatic: Automatic::Libvirt, interval: Duration::from_secs(10) }
    }
}

/// `[defaults]`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Defaults {
    /// The policy.
    pub policy: PolicySetting,
    /// What a VM is to reach.
    #[serde(deserialize_with = "values::guarantee")]
    pub guarantee: Guarantee,
    /// How long it may be under that before it is reported.
    #[serde(deserialize_with = "values::interval")]
    pub grace: Duration,
    /// Whether shared memory may be collapsed, which stops a guest for 15 to 30 ms a window.
    pub collapse_shared: bool,
}

impl Default for Defaults {
    /// `auto` because it acts only where it pays; half a minute because a guest that boots is under everything at first.
    fn default() -> Defaults {
        Defaults {
            policy: PolicySetting::default(),
            guarantee: Guarantee::BestEffort,
            grace: Duration::from_secs(30),
            collapse_shared: false,
        }
    }
}

/// `[[vm]]`: what holds for VMs whose name the pattern is. A later rule overrides an earlier one.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmRule {
    /// Which.
    pub name: Pattern,
    /// As in [`Defaults`].
    pub policy: Option<PolicySetting>,
    /// As in [`Defaults`].
    #[serde(default, deserialize_with = "values::some_guarantee")]
    pub guarantee: Option<Guarantee>,
    /// As in [`Defaults`].
    pub collapse_shared: Option<bool>,
    /// A QMP socket that nobody else is connected to.
    pub qmp: Option<PathBuf>,
    /// Its part of the budget beside the others'.
    #[serde(default, deserialize_with = "values::weight")]
    pub weight: Option<u32>,
    /// Its copies per second are never more than that.
    #[serde(default, deserialize_with = "values::some_size")]
    pub copy_per_second: Option<Bytes>,
    /// Once that much is resident only because its pages are large, nothing is promoted that takes more.
    #[serde(default, deserialize_with = "values::some_size")]
    pub bloat_max: Option<Bytes>,
}

/// What holds for one VM.
#[derive(Clone, Debug, PartialEq)]
pub struct Wanted {
    /// What is done.
    pub policy: PolicySetting,
    /// What is to be reached.
    pub guarantee: Guarantee,
    /// Whether shared memory may be collapsed.
    pub collapse_shared: bool,
    /// A QMP socket to ask.
    pub qmp: Option<PathBuf>,
    /// Part of the budget beside the others'.
    pub weight: u32,
    /// Bound of its copies per second.
    pub copy_per_second: Option<Bytes>,
    /// Bound of its bloat.
    pub bloat_max: Option<Bytes>,
}

impl Config {
    /// Reads a file's text.
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
    /// That it can not be read, or the first mistake in it.
    pub fn read(path: &Path) -> Result<Config, ConfigError> {
        let at = || path.to_owned();
        let text = InputFile::open_stream(path).and_then(|file| file.read_text(FILE_MAX));
        let text = text.map_err(|error| ConfigError::Unreadable { path: at(), source: error.into() })?;
        Config::parse(&text).map_err(|mistake| ConfigError::Mistaken { path: at(), mistake })
    }

    fn contradiction(&self) -> Option<String> {
        let HostConfig { low_free, high_free } = self.host;
        (high_free < low_free).then(|| {
            format!("host.high_free ({high_free}) is below host.low_free ({low_free}): make it at least as large")
        })
    }

    /// What holds for a VM of that name, of which `said` was said over the socket.
    ///
    /// # Errors
    /// What is wrong with what was said.
    pub fn wanted(&self, name: &str, said: &Settings) -> Result<Wanted, String> {
        let mut wanted = Wanted {
            policy: self.defaults.policy.clone(),
            guarantee: self.defaults.guarantee,
            collapse_shared: self.defaults.collapse_shared,
            qmp: None,
            weight: 1,
            copy_per_second: None,
            bloat_max: None,
        };
        self.vm.iter().filter(|rule| rule.name.is_match(name)).for_each(|rule| rule.apply(&mut wanted));
        apply_said(said, &mut wanted)?;
        Ok(wanted)
    }
}

impl VmRule {
    fn apply(&self, wanted: &mut Wanted) {
        set(&mut wanted.policy, self.policy.clone());
        set(&mut wanted.guarantee, self.guarantee);
        set(&mut wanted.collapse_shared, self.collapse_shared);
        set(&mut wanted.weight, self.weight);
        wanted.qmp = self.qmp.clone().or(wanted.qmp.take());
        wanted.copy_per_second = self.copy_per_second.or(wanted.copy_per_second);
        wanted.bloat_max = self.bloat_max.or(wanted.bloat_max);
    }
}

fn apply_said(said: &Settings, wanted: &mut Wanted) -> Result<(), String> {
    let policy = said.policy.as_deref().map(PolicySetting::parse).transpose()?;
    let guarantee =
        said.guarantee.as_deref().map(str::parse).transpose().map_err(|error: GuaranteeError| error.to_string())?;
    set(&mut wanted.policy, policy);
    set(&mut wanted.guarantee, guarantee);
    set(&mut wanted.collapse_shared, said.collapse_shared);
    wanted.qmp = said.qmp.clone().or(wanted.qmp.take());
    Ok(())
}

fn set<T>(place: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *place = value;
    }
}

/// What is wrong with a configuration's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistake {
    /// Line and column, from 1 on; `None` where it is about the whole.
    pub place: Option<(usize, usize)>,
    /// What.
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

/// Why there is no configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file can not be read.
    #[error("{}: {source}", path.display())]
    Unreadable {
        /// Which.
        path: PathBuf,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// Its text is wrong.
    #[error("{}{mistake}", path.display())]
    Mistaken {
        /// Which.
        path: PathBuf,
        /// What and where.
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

    /// Of the file that is installed as an example.
    const EXAMPLE: &str = include_str!("../../../packaging/wideleafd.toml");

    #[test]
    fn the_example_says_what_holds_without_it() {
        assert_eq!(Config::parse(EXAMPLE).expect("nothing is wrong"), Config::default());
    }

    #[test]
    fn what_the_example_has_as_comments_can_be_said_too() {
        let said: String = EXAMPLE
            .lines()
            .map(|line| {
                line.strip_prefix("# ").filter(|rest| rest.starts_with("[[") || rest.contains(" = ")).unwrap_or(line)
            })
            .flat_map(|line| [line, "\n"])
            .collect();
        let config = Config::parse(&said).expect("nothing is wrong");
        assert_eq!((config.vm.len(), config.socket.group.as_deref()), (1, Some("wideleaf")));
        let wanted = config.wanted("web-1", &Settings::default()).expect("it makes sense");
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
        assert!(mistake("[attach]\nautomatic = \"some\"").starts_with(":2:13: "));
        assert!(mistake("[attach]\ninterval = \"10\"").starts_with(":2:12: \"10\" is not a time"));
        assert!(mistake("[metrics]\nlisten = \"here\"").starts_with(":2:10: \"here\" is nowhere to listen"));
    }

    #[test]
    fn a_policy_that_every_guest_would_refuse_is_a_mistake_with_the_reason_that_set_gives() {
        for policy in ["at-fault", "reservation", "prealloc", "giant"] {
            for (text, place) in [
                (format!("[defaults]\npolicy = \"{policy}\"\n"), ":2:10: "),
                (format!("[[vm]]\nname = \"a\"\npolicy = \"{policy}\"\n"), ":3:10: "),
            ] {
                let mistake = mistake(&text);
                assert!(mistake.starts_with(place) && mistake.contains("guests of `wideleaf run` alone"), "{mistake}");
            }
        }
    }

    #[test]
    fn watermarks_that_contradict_each_other_are_refused() {
        let text = mistake("[host]\nlow_free = \"2G\"\nhigh_free = \"1G\"\n");
        assert!(text.contains("high_free (1 GiB) is below host.low_free (2 GiB)"), "{text}");
    }

    #[test]
    fn a_later_rule_overrides_and_what_was_said_overrides_all() {
        let text = "[defaults]\nguarantee = \"90%\"\n[[vm]]\nname = \"web*\"\npolicy = \"off\"\nweight = 2\n\
                    [[vm]]\nname = \"web-1\"\npolicy = \"greedy\"\nbloat_max = \"64M\"\n";
        let config = Config::parse(text).expect("all of it makes sense");
        let of = |name: &str, said: &Settings| config.wanted(name, said).expect("it is what the file says");
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
        assert!(config.wanted("web-1", &said).expect_err("no such policy").contains("no policy \"nope\""));
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "[\\[\\]a-z_\"= \n0-9%*.]{0,200}") {
            let _ = Config::parse(&text).map_err(|mistake| mistake.to_string());
        }
    }
}
