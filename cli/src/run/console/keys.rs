//! Meaning of the keys on the console: every key belongs to the guest, except the one after Ctrl-A. A state machine of
//! two states, without input or output of its own.

/// Key that begins a command. The same as in the consoles of QEMU and screen.
const ESCAPE: u8 = 0x01;

/// Help text of Ctrl-A h.
pub(super) const HELP: &str =
    "Ctrl-A x  stop the VM    Ctrl-A p  press its power button    Ctrl-A a  send Ctrl-A    Ctrl-A h  this help";

/// Action for a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Meaning {
    /// Send it to the guest.
    Typed(u8),
    /// Stop the VM.
    Stop,
    /// Ask the guest to power off.
    Ask,
    /// Show [`HELP`].
    Help,
    /// Nothing yet, or not a command.
    Nothing,
}

/// State of the key sequence.
#[derive(Debug, Default)]
pub(super) struct Keys {
    is_escaped: bool,
}

impl Keys {
    pub(super) fn press(&mut self, key: u8) -> Meaning {
        let was_escaped = self.is_escaped;
        self.is_escaped = !was_escaped && key == ESCAPE;
        match key {
            ESCAPE if !was_escaped => Meaning::Nothing,
            _ if !was_escaped => Meaning::Typed(key),
            b'x' => Meaning::Stop,
            b'p' => Meaning::Ask,
            b'a' | ESCAPE => Meaning::Typed(ESCAPE),
            b'h' | b'?' => Meaning::Help,
            _ => Meaning::Nothing,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meanings(keys: &[u8]) -> Vec<Meaning> {
        let mut pressed = Keys::default();
        keys.iter().map(|key| pressed.press(*key)).collect()
    }

    #[test]
    fn all_keys_are_the_guests_except_those_after_ctrl_a() {
        let typed: Vec<Meaning> = (0..=255).filter(|key| *key != 1).map(Meaning::Typed).collect();
        assert_eq!(meanings(&(0..=255).filter(|key| *key != 1).collect::<Vec<u8>>()), typed);
        assert_eq!(meanings(b"\x01x"), [Meaning::Nothing, Meaning::Stop]);
        assert_eq!(meanings(b"\x01pp"), [Meaning::Nothing, Meaning::Ask, Meaning::Typed(b'p')]);
        assert_eq!(meanings(b"\x01h"), [Meaning::Nothing, Meaning::Help]);
        assert_eq!(meanings(b"\x01zx"), [Meaning::Nothing, Meaning::Nothing, Meaning::Typed(b'x')]);
    }

    #[test]
    fn ctrl_a_is_sent_by_ctrl_a_a_and_begins_anew_afterwards() {
        assert_eq!(meanings(b"\x01ax"), [Meaning::Nothing, Meaning::Typed(1), Meaning::Typed(b'x')]);
        assert_eq!(meanings(b"\x01\x01x"), [Meaning::Nothing, Meaning::Typed(1), Meaning::Typed(b'x')]);
    }
}
