//! The values of the configuration: their form (`"2G"`, `"50%"`, `"10s"`) and meaning. The error for another value
//! shows the right form.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use serde::{Deserialize, de};
use wideleaf_attach::refuse::refuse_policy;
use wideleaf_control::protocol::Settings;
use wideleaf_control::view::{Guarantee, GuaranteeError};
use wideleaf_memory::block_supply::HELD_MAX;
use wideleaf_memory::manager::{OutOfReach, OutOfReachError};
use wideleaf_policies::{Bytes, PolicyChoice};

use super::Pattern;

/// Policy of a VM, or none.
#[derive(Clone, Debug)]
pub enum PolicySetting {
    /// No policy: the VM is only observed.
    Off,
    /// The VM has this policy.
    Use(PolicyChoice),
}

impl PolicySetting {
    /// Parses `off`, or a policy as on the command line.
    ///
    /// # Errors
    /// The existing policies.
    pub fn parse(text: &str) -> Result<PolicySetting, String> {
        match text {
            "off" => Ok(PolicySetting::Off),
            text => PolicyChoice::parse(text).map(PolicySetting::Use).map_err(|error| error.to_string()),
        }
    }
}

impl Default for PolicySetting {
    fn default() -> PolicySetting {
        PolicySetting::parse("auto").expect("it is in the table of policies")
    }
}

impl fmt::Display for PolicySetting {
    /// Text that [`PolicySetting::parse`] reads again.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PolicySetting::Off => f.write_str("off"),
            PolicySetting::Use(choice) => choice.fmt(f),
        }
    }
}

/// Two with the same text are equal.
impl PartialEq for PolicySetting {
    fn eq(&self, other: &PolicySetting) -> bool {
        self.to_string() == other.to_string()
    }
}

impl<'de> Deserialize<'de> for PolicySetting {
    /// A policy in the file is for external guests: one that each of them would refuse is a mistake in the file.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<PolicySetting, D::Error> {
        read(deserializer, |text| match PolicySetting::parse(text)? {
            PolicySetting::Use(choice) => refuse_policy(&choice).map_or(Ok(PolicySetting::Use(choice)), Err),
            PolicySetting::Off => Ok(PolicySetting::Off),
        })
    }
}

/// Guests that are attached without an operator's request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Automatic {
    /// `"libvirt"`: the domains that libvirt's hook reports.
    Libvirt,
    /// `"none"`: no guest.
    None,
    /// `"all"`: every guest.
    All,
    /// `["web*", "db"]`: guests by name.
    Named(Vec<Pattern>),
}

impl Automatic {
    /// Whether a guest of that name is taken without a report of the hook.
    pub fn is_match(&self, name: &str) -> bool {
        match self {
            Automatic::Libvirt | Automatic::None => false,
            Automatic::All => true,
            Automatic::Named(patterns) => patterns.iter().any(|pattern| pattern.is_match(name)),
        }
    }

    /// Whether a libvirt domain that the hook reports is taken, with the settings of its metadata. One that asks
    /// for it always is.
    pub fn takes_domain(&self, name: &str, said: &Settings) -> bool {
        *self == Automatic::Libvirt || self.is_match(name) || asks_for_care(said)
    }
}

/// Whether the settings ask for more than observation: a policy, or a guarantee. A malformed one also counts, and
/// is refused with a reason later.
fn asks_for_care(said: &Settings) -> bool {
    let has_policy = said.policy.as_deref().is_some_and(|policy| policy != "off");
    has_policy || said.guarantee.as_deref().is_some_and(|wanted| wanted.parse() != Ok(Guarantee::BestEffort))
}

impl fmt::Display for Automatic {
    /// The value as in the file.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Automatic::Libvirt => f.write_str("\"libvirt\""),
            Automatic::None => f.write_str("\"none\""),
            Automatic::All => f.write_str("\"all\""),
            Automatic::Named(patterns) => f.debug_list().entries(patterns.iter().map(ToString::to_string)).finish(),
        }
    }
}

impl<'de> Deserialize<'de> for Automatic {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Automatic, D::Error> {
        deserializer.deserialize_any(AutomaticVisitor)
    }
}

struct AutomaticVisitor;

impl<'de> Visitor<'de> for AutomaticVisitor {
    type Value = Automatic;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("\"libvirt\", \"none\", \"all\" or a list of names like [\"web*\", \"db\"]")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Automatic, E> {
        match text {
            "libvirt" => Ok(Automatic::Libvirt),
            "none" => Ok(Automatic::None),
            "all" => Ok(Automatic::All),
            _ => Err(E::invalid_value(de::Unexpected::Str(text), &self)),
        }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut names: A) -> Result<Automatic, A::Error> {
        let mut patterns = Vec::new();
        while let Some(pattern) = names.next_element()? {
            patterns.push(pattern);
        }
        Ok(Automatic::Named(patterns))
    }
}

/// Address of the metrics endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    /// `"off"`: no endpoint.
    Off,
    /// `"127.0.0.1:9477"`: a TCP port.
    Tcp(SocketAddr),
    /// `"unix:/run/wideleaf/metrics.sock"`: a Unix socket.
    Unix(PathBuf),
}

impl Listen {
    fn parse(text: &str) -> Result<Listen, String> {
        match (text, text.strip_prefix("unix:")) {
            ("off", _) => Ok(Listen::Off),
            (_, Some(path)) if path.starts_with('/') => Ok(Listen::Unix(path.into())),
            _ => text.parse().map(Listen::Tcp).map_err(|_| {
                format!("{text:?} is not an address to listen at: write \"127.0.0.1:9477\", \"unix:/PATH\" or \"off\"")
            }),
        }
    }
}

impl Default for Listen {
    /// This host only, since the names of its VMs are in the metrics.
    fn default() -> Listen {
        Listen::Tcp(SocketAddr::from(([127, 0, 0, 1], 9477)))
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Listen::Off => f.write_str("off"),
            Listen::Tcp(address) => address.fmt(f),
            Listen::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl<'de> Deserialize<'de> for Listen {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Listen, D::Error> {
        read(deserializer, Listen::parse)
    }
}

/// Parses `50%` or `99.5%` as ten thousandths.
///
/// # Errors
/// The right form.
pub fn share_from(text: &str) -> Result<u32, String> {
    let number = text.strip_suffix('%').and_then(|number| number.trim().parse::<f64>().ok());
    match number {
        Some(percent) if (0.0..=100.0).contains(&percent) => Ok((percent * 100.0).round() as u32),
        _ => Err(format!("{text:?} is not a share: write a number from 0 to 100 and a %, like \"50%\"")),
    }
}

/// A size such as `"512M"`.
pub(super) fn size<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Bytes, D::Error> {
    read(deserializer, |text| Bytes::parse(text).map_err(|error| format!("{text:?}: {error}")))
}

/// A size that may be left out.
pub(super) fn some_size<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Bytes>, D::Error> {
    size(deserializer).map(Some)
}

/// A share such as `"50%"`.
pub(super) fn share<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    read(deserializer, share_from)
}

/// A part of the time such as `"30%"`, not zero.
pub(super) fn out_of_reach<'de, D: Deserializer<'de>>(deserializer: D) -> Result<OutOfReach, D::Error> {
    read(deserializer, |text| text.parse().map_err(|error: OutOfReachError| error.to_string()))
}

/// A part of the time that may be left out.
pub(super) fn some_out_of_reach<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<OutOfReach>, D::Error> {
    out_of_reach(deserializer).map(Some)
}

/// A guarantee, such as `"guaranteed:95%"` or `"bestEffort"`.
pub(super) fn guarantee<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Guarantee, D::Error> {
    read(deserializer, |text| text.parse().map_err(|error: GuaranteeError| error.to_string()))
}

/// A guarantee that may be left out.
pub(super) fn some_guarantee<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Guarantee>, D::Error> {
    guarantee(deserializer).map(Some)
}

/// Permission bits such as `"0660"`.
pub(super) fn mode<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    read(deserializer, |text| match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o777 => Ok(mode),
        _ => Err(format!("{text:?} is not a mode: write it in octal, like \"0660\"")),
    })
}

/// Upper bound on the factor of a burst: more would leave no time to a guest on the same core.
const BURST_MAX: u32 = 16;

/// A factor such as `2`.
pub(super) fn burst<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    let burst = i64::deserialize(deserializer)?;
    match u32::try_from(burst) {
        Ok(burst @ 1..=BURST_MAX) => Ok(burst),
        _ => Err(D::Error::custom(format!(
            "{burst} is not a burst: write a whole number from 1 (the budget, no more) to {BURST_MAX}"
        ))),
    }
}

/// Upper bound on the ratio of two VMs' weights: shares stay far above the cost of a single action.
const WEIGHT_MAX: u32 = 1_000;

/// A weight such as `2`.
pub(super) fn weight<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    let weight = i64::deserialize(deserializer)?;
    match u32::try_from(weight) {
        Ok(weight @ 1..=WEIGHT_MAX) => Ok(Some(weight)),
        _ => Err(D::Error::custom(format!(
            "{weight} is not a weight: write a whole number from 1 to {WEIGHT_MAX} (\"off\" is a policy)"
        ))),
    }
}

/// A number of blocks of 2 MiB such as `8`.
pub(super) fn blocks<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let blocks = i64::deserialize(deserializer)?;
    match u64::try_from(blocks) {
        Ok(blocks @ 1..=HELD_MAX) => Ok(blocks),
        _ => Err(D::Error::custom(format!(
            "{blocks} is not a number of blocks: write a whole number from 1 to {HELD_MAX}; \
             supply.cpu_share = \"0%\" makes none"
        ))),
    }
}

/// A time such as `"10s"`, in whole seconds: nothing here runs more often than once a second.
pub(super) fn interval<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    read(deserializer, |text| time_from(text, 1))
}

/// A time such as `"5m"`, or `"0s"`.
pub(super) fn interval_or_zero<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    read(deserializer, |text| time_from(text, 0))
}

fn time_from(text: &str, shortest_s: u64) -> Result<Duration, String> {
    let seconds = match text.strip_suffix('s') {
        Some(number) => number.parse::<u64>().ok(),
        None => text.strip_suffix('m').and_then(|number| number.parse::<u64>().ok()?.checked_mul(60)),
    };
    match seconds {
        Some(seconds) if (shortest_s..=86_400).contains(&seconds) => Ok(Duration::from_secs(seconds)),
        _ => Err(format!(
            "{text:?} is not a time: write whole seconds or minutes, like \"10s\" or \"5m\", at most a day"
        )),
    }
}

fn read<'de, D: Deserializer<'de>, T>(
    deserializer: D,
    parse: impl Fn(&str) -> Result<T, String>,
) -> Result<T, D::Error> {
    parse(&String::deserialize(deserializer)?).map_err(D::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_a_percentage() {
        assert_eq!((share_from("50%"), share_from("99.5%"), share_from("0 %")), (Ok(5_000), Ok(9_950), Ok(0)));
        for wrong in ["50", "%", "101%", "-1%", "NaN%", "inf%", ""] {
            assert!(share_from(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_domain_is_taken_by_the_configuration_or_at_its_own_request() {
        let says = |policy: Option<&str>, guarantee: Option<&str>| {
            let [policy, guarantee] = [policy, guarantee].map(|word| word.map(str::to_owned));
            Settings { policy, guarantee, ..Settings::default() }
        };
        let asking = [
            says(Some("auto"), None),
            says(None, Some("95%")),
            says(Some("off"), Some("95%")),
            says(Some("nope"), None),
        ];
        let silent = [says(None, None), says(Some("off"), None), says(None, Some("best-effort"))];
        let named = Automatic::Named(vec!["web*".into()]);
        for (automatic, of_web, of_db) in [
            (Automatic::Libvirt, true, true),
            (Automatic::None, false, false),
            (Automatic::All, true, true),
            (named, true, false),
        ] {
            for said in &silent {
                let takes = ["web-1", "db"].map(|name| automatic.takes_domain(name, said));
                assert_eq!(takes, [of_web, of_db], "{automatic:?} {said:?}");
            }
            for said in &asking {
                assert!(automatic.takes_domain("db", said), "{automatic:?} {said:?}");
            }
        }
        assert!(!Automatic::Libvirt.is_match("web-1"), "the hook did not report it");
    }

    #[test]
    fn a_time_may_be_zero_only_where_that_means_something() {
        let seconds = |text, shortest_s| time_from(text, shortest_s).ok().map(|time| time.as_secs());
        assert_eq!(["10s", "5m", "0s", "1441m"].map(|text| seconds(text, 1)), [Some(10), Some(300), None, None]);
        assert_eq!(["0s", "0m", "1441m"].map(|text| seconds(text, 0)), [Some(0), Some(0), None]);
    }

    #[test]
    fn listen_is_an_address_a_path_or_off() {
        assert_eq!(Listen::parse("off"), Ok(Listen::Off));
        assert_eq!(Listen::parse("unix:/run/a.sock"), Ok(Listen::Unix("/run/a.sock".into())));
        for here in ["[::1]:9477", "127.0.0.1:9477", "unix:/run/a.sock", "off"] {
            assert_eq!(Listen::parse(here).map(|listen| listen.to_string()), Ok(here.to_owned()));
        }
        assert!(Listen::parse("unix:a.sock").is_err() && Listen::parse("localhost").is_err());
    }
}
