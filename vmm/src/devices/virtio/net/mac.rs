//! The address of a network card: given, or made of names so that it is the same at every start.

use std::fmt;
use std::str::FromStr;

/// Six bytes of which the first says that one card is meant, and not all that listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mac([u8; 6]);

/// What is no address of a card.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MacError {
    /// Not six numbers.
    #[error("{0:?} is no MAC address: say six bytes in hexadecimal, like 02:00:00:00:00:01")]
    Malformed(String),
    /// A group's.
    #[error("{0} is the address of a group and of no card: its first byte must be even")]
    Group(Mac),
    /// Nobody's.
    #[error("00:00:00:00:00:00 is nobody's address")]
    Zero,
}

/// Of the first byte (IEEE 802-2014, 8.2.2): an address of many, and one that no manufacturer gave.
const GROUP: u8 = 1;
const LOCAL: u8 = 2;

impl Mac {
    /// An address that somebody administers locally, always the same for the same card of the same machine, and another one elsewhere.
    pub fn of(machine: &str, card: &str) -> Mac {
        // FNV-1a (draft-eastlake-fnv): the addresses of a few cards must differ, and nothing has to withstand anybody.
        let text = machine.bytes().chain([0]).chain(card.bytes());
        let hash =
            text.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
        let [_, _, first, rest @ ..] = hash.to_be_bytes();
        let [b, c, d, e, f] = rest;
        Mac([first & !GROUP | LOCAL, b, c, d, e, f])
    }

    /// As the card has it.
    pub fn bytes(self) -> [u8; 6] {
        self.0
    }
}

impl FromStr for Mac {
    type Err = MacError;

    fn from_str(text: &str) -> Result<Mac, MacError> {
        let malformed = || MacError::Malformed(text.to_owned());
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part =
                parts.next().filter(|part| part.len() == 2 && part.bytes().all(|digit| digit.is_ascii_hexdigit()));
            *byte = part.and_then(|part| u8::from_str_radix(part, 16).ok()).ok_or_else(malformed)?;
        }
        match Mac(bytes) {
            _ if parts.next().is_some() => Err(malformed()),
            Mac([0, 0, 0, 0, 0, 0]) => Err(MacError::Zero),
            group if bytes[0] & GROUP != 0 => Err(MacError::Group(group)),
            mac => Ok(mac),
        }
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_read_and_printed() {
        assert_eq!("52:54:00:AB:cd:0f".parse::<Mac>().unwrap().to_string(), "52:54:00:ab:cd:0f");
    }

    #[test]
    fn what_is_no_card_s_address_is_refused() {
        for text in
            ["", "52:54:00:12:34", "52:54:00:12:34:56:78", "52:54:0:12:34:56", "52-54-00-12-34-56", "+2:54:00:12:34:56"]
        {
            assert_eq!(text.parse::<Mac>(), Err(MacError::Malformed(text.to_owned())));
        }
        assert!(matches!("01:00:5e:00:00:01".parse::<Mac>(), Err(MacError::Group(_))));
        assert_eq!("00:00:00:00:00:00".parse::<Mac>(), Err(MacError::Zero));
    }

    #[test]
    fn a_made_address_is_local_stable_and_the_card_s_own() {
        let mac = Mac::of("machine", "tap0");
        assert_eq!(mac, Mac::of("machine", "tap0"));
        assert_ne!(mac, Mac::of("machine", "tap1"));
        assert_ne!(mac, Mac::of("another", "tap0"));
        assert_eq!(mac.bytes()[0] & 3, 2);
        assert_eq!(mac.to_string().parse(), Ok(mac));
    }
}
