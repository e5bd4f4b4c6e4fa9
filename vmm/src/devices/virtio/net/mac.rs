//! The address of a network card: given, or derived from names so that it is the same at every start.

use std::fmt;
use std::str::FromStr;

/// Six bytes; the first one marks the address as that of a single card, not of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mac([u8; 6]);

/// The reasons why a text is not a card's address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MacError {
    /// The text is not six hexadecimal bytes.
    #[error("cannot use MAC address {0:?}: write six bytes in hexadecimal, like 02:00:00:00:00:01")]
    Malformed(String),
    /// The address is that of a group.
    #[error("cannot use MAC address {0}: it belongs to a group; make its first byte even")]
    Group(Mac),
    /// The address is all zeroes.
    #[error("cannot use MAC address 00:00:00:00:00:00: no card has it; choose another")]
    Zero,
}

/// Bits of the first byte (IEEE 802-2014, 8.2.2): group address, and locally administered address.
const GROUP: u8 = 1;
const LOCAL: u8 = 2;

impl Mac {
    /// A locally administered address, always the same for the same card of the same machine, and
    /// different for others.
    pub fn of(machine: &str, card: &str) -> Mac {
        // FNV-1a (draft-eastlake-fnv): the addresses of a few cards must differ; no attack has to be resisted.
        let text = machine.bytes().chain([0]).chain(card.bytes());
        let hash =
            text.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
        let [_, _, first, rest @ ..] = hash.to_be_bytes();
        let [b, c, d, e, f] = rest;
        Mac([first & !GROUP | LOCAL, b, c, d, e, f])
    }

    /// Bytes in the card's order.
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
    fn an_invalid_card_address_is_refused() {
        for text in
            ["", "52:54:00:12:34", "52:54:00:12:34:56:78", "52:54:0:12:34:56", "52-54-00-12-34-56", "+2:54:00:12:34:56"]
        {
            assert_eq!(text.parse::<Mac>(), Err(MacError::Malformed(text.to_owned())));
        }
        assert!(matches!("01:00:5e:00:00:01".parse::<Mac>(), Err(MacError::Group(_))));
        assert_eq!("00:00:00:00:00:00".parse::<Mac>(), Err(MacError::Zero));
    }

    #[test]
    fn a_derived_address_is_local_stable_and_unique_to_its_card() {
        let mac = Mac::of("machine", "tap0");
        assert_eq!(mac, Mac::of("machine", "tap0"));
        assert_ne!(mac, Mac::of("machine", "tap1"));
        assert_ne!(mac, Mac::of("another", "tap0"));
        assert_eq!(mac.bytes()[0] & 3, 2);
        assert_eq!(mac.to_string().parse(), Ok(mac));
    }
}
