//! What a run's own manager knows of the windows of its guest, for its control socket and for wideleafd. It comes from
//! the manager's latest tick: neither the guest nor the loop waits for it.

use wideleaf_attach::live_view::{OwnGuest, bids};
use wideleaf_control::protocol::LiveReport;
use wideleaf_control::server::REQUEST_BYTES_MAX;
use wideleaf_control::view::{Explanation, WindowMap};
use wideleaf_memory::manager::Live;
use wideleaf_policies::MappingStats;

use crate::policy_switch::PolicySwitch;

/// Note of a VM with the policy off.
const IS_OFF: &str = "its policy is off: nothing is promoted until it has another";

/// Upper bound on the columns of a reported map. The rest of the line has the VM, its reasons and notes.
const MAP_BYTES_MAX: usize = REQUEST_BYTES_MAX / 4 * 3;

/// Reasons why windows are not huge.
pub fn explanation(guest: &OwnGuest, live: &Live, policy: &PolicySwitch) -> Explanation {
    let mut explanation = guest.explanation(live);
    if live.ticks == 0 {
        (explanation.windows, explanation.huge) = (None, None);
    }
    explanation.notes.extend(policy.is_off().then(|| IS_OFF.to_owned()));
    explanation
}

/// All windows. `mapping`: KVM's totals.
pub fn windows(guest: &OwnGuest, live: &Live, mapping: Option<MappingStats>, policy: &PolicySwitch) -> WindowMap {
    let mut map = guest.windows(live, mapping);
    map.notes.extend(policy.is_off().then(|| IS_OFF.to_owned()));
    map
}

/// Report for wideleafd; all windows only where `wants_windows`. Nothing before the manager's first tick: the daemon
/// then reads the process from outside.
pub fn report(
    guest: &OwnGuest,
    live: &Live,
    mapping: Option<MappingStats>,
    policy: &PolicySwitch,
    wants_windows: bool,
) -> LiveReport {
    if live.ticks == 0 {
        return LiveReport::default();
    }
    LiveReport {
        explanation: Some(Box::new(explanation(guest, live, policy))),
        windows: wants_windows.then(|| Box::new(that_fits(windows(guest, live, mapping, policy)))),
        bids: bids(live).map(Box::new),
    }
}

/// The map, or why it is not reported.
fn that_fits(map: WindowMap) -> WindowMap {
    if map.bytes() <= MAP_BYTES_MAX {
        return map;
    }
    let windows = map.windows();
    let why = format!("its own manager's map of {windows} windows is too long for wideleafd: ask its --control-socket");
    WindowMap { name: map.name, notes: vec![why], ..WindowMap::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wideleaf_control::view::WindowRange;

    fn of(windows: usize) -> WindowMap {
        let [backing, second_level, heat] = ["4", "4", "?"].map(|letter| letter.repeat(windows));
        let range = WindowRange { backing, second_level, heat, state: format!("r{windows}"), ..WindowRange::default() };
        WindowMap { name: "big".into(), ranges: vec![range], ..WindowMap::default() }
    }

    #[test]
    fn a_map_of_a_guest_of_256_gib_is_reported_and_one_that_is_too_long_has_a_note_instead() {
        let windows_of_256_gib = 256 * 512;
        assert_eq!(that_fits(of(windows_of_256_gib)), of(windows_of_256_gib));
        let long = that_fits(of(4 * windows_of_256_gib));
        assert_eq!((long.name.as_str(), long.ranges.len()), ("big", 0));
        assert!(long.notes[0].contains("524288 windows is too long"), "{:?}", long.notes);
    }
}
