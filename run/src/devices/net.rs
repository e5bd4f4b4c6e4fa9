//! `--net`: a network card on a tap of the host.

use std::collections::BTreeSet;
use std::sync::Arc;

use wideleaf_vmm::devices::virtio::net::{Mac, Net, NetConfig, Tap, TapError};

use crate::failure::Failure;
use crate::front_end::FrontEnd;
use crate::spec::NetOptions;

/// Opens the tap. As root it creates a missing tap for the run, and says so. Returns the card and its name.
pub(super) fn open(options: &NetOptions, front: &dyn FrontEnd) -> Result<(Net, String), Failure> {
    let tap = Tap::open(&options.tap).map_err(from_tap_error)?;
    let mac = options.mac.unwrap_or_else(|| mac_of(tap.name()));
    if tap.is_made() {
        let hint = "give it an address or a bridge during the run";
        front.say(&format!("made the tap {} for this run; {hint}", tap.name()));
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
    fn two_cards_of_one_address_are_refused() {
        let mac = "02:00:00:00:00:01".parse::<Mac>().expect("it is well-formed");
        let cards = |mac: Option<Mac>| ["a", "b"].map(|tap| NetOptions { tap: tap.into(), mac });
        assert!(check(&cards(None)).is_ok());
        assert!(check(&cards(Some(mac))).is_err());
    }
}
