//! `--net`: a network card on a tap of the host.

use std::collections::BTreeSet;
use std::sync::Arc;

use wideleaf_vmm::devices::virtio::net::{Mac, Net, NetConfig, Tap, TapError};

use crate::failure::Failure;
use crate::output::say;

/// Settings of a card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetOptions {
    /// Name of the tap.
    pub tap: String,
    /// Address of the card, if it is not derived from names.
    pub mac: Option<Mac>,
}

/// Parses `tap=NAME[,mac=AA:BB:CC:DD:EE:FF]`.
pub(super) fn parse(text: &str) -> Result<NetOptions, String> {
    let (mut tap, mut mac) = (None, None);
    for word in text.split(',') {
        match word.split_once('=') {
            Some(("tap", name)) if tap.is_none() => tap = Some(name.to_owned()),
            Some(("mac", address)) if mac.is_none() => mac = Some(address.parse::<Mac>().map_err(|e| e.to_string())?),
            _ => return Err(format!("unknown {word:?}: use `tap=NAME` and `mac=AA:BB:CC:DD:EE:FF`, each once")),
        }
    }
    let tap = tap.filter(|name| !name.is_empty()).ok_or("there is no tap: name it with tap=NAME")?;
    Ok(NetOptions { tap, mac })
}

/// Opens the tap. As root it creates a missing tap for the run, and says so. Returns the card and its name.
pub(super) fn open(options: &NetOptions) -> Result<(Net, String), Failure> {
    let tap = Tap::open(&options.tap).map_err(from_tap_error)?;
    let mac = options.mac.unwrap_or_else(|| mac_of(tap.name()));
    if tap.is_made() {
        say(format_args!("made the tap {} for this run; give it an address or a bridge during the run", tap.name()));
    }
    let name = format!("net {} {mac}", tap.name());
    let config = NetConfig { mac, mtu: tap.mtu() };
    Ok((Net::new(Arc::new(tap), config), name))
}

/// A network cannot distinguish two cards with one address.
pub(super) fn check(cards: &[NetOptions]) -> Result<(), Failure> {
    let mut seen = BTreeSet::new();
    for NetOptions { tap, mac } in cards {
        let mac = mac.unwrap_or_else(|| mac_of(tap));
        if !seen.insert(mac.bytes()) {
            return Err(Failure::Usage(format!(
                "cannot use --net: two cards have the address {mac}; give each its own"
            )));
        }
    }
    Ok(())
}

/// The same address for this tap of this machine at every run.
fn mac_of(tap: &str) -> Mac {
    let read = |path| std::fs::read_to_string(path).ok().filter(|text| !text.trim().is_empty());
    let machine = read("/etc/machine-id").or_else(|| read("/proc/sys/kernel/hostname")).unwrap_or_default();
    Mac::of(machine.trim(), tap)
}

fn from_tap_error(error: TapError) -> Failure {
    let text = format!("cannot use --net: {error}");
    match error {
        TapError::Name(_) => Failure::Usage(text),
        TapError::NoTap { .. } => Failure::Input(text),
        TapError::NoDevice(_)
        | TapError::Absent { .. }
        | TapError::NotOurs { .. }
        | TapError::Taken { .. }
        | TapError::Host { .. } => Failure::Host(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_is_a_tap_and_perhaps_an_address() {
        assert_eq!(parse("tap=tap0"), Ok(NetOptions { tap: "tap0".into(), mac: None }));
        let both = parse("mac=52:54:00:00:00:01,tap=tap0").expect("both are said");
        assert_eq!(
            (both.tap.as_str(), both.mac.expect("it is said").to_string().as_str()),
            ("tap0", "52:54:00:00:00:01")
        );
        for bad in ["", "tap0", "tap=", "mac=52:54:00:00:00:01", "tap=a,tap=b", "tap=a,mac=1", "tap=a,", "tap=a,mtu=9"]
        {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn two_cards_of_one_address_are_refused() {
        let cards = |texts: [&str; 2]| texts.map(|text| parse(text).expect("they are well-formed"));
        assert!(check(&cards(["tap=a", "tap=b"])).is_ok());
        assert!(check(&cards(["tap=a,mac=02:00:00:00:00:01", "tap=b,mac=02:00:00:00:00:01"])).is_err());
    }
}
