//! KVM's structs as text: their bytes, two hexadecimal digits each. KVM's own headers fix their layout, and every
//! pattern of bytes is a value, which KVM checks when it receives it.

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// A struct of KVM.
#[derive(Clone, Copy, Debug, Default)]
pub struct Plain<T>(pub T);

impl<T: IntoBytes + Immutable> Serialize for Plain<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&hex::encode(self.0.as_bytes()))
    }
}

impl<'de, T: FromBytes> Deserialize<'de> for Plain<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let bytes = Digits::deserialize(deserializer)?.0;
        let wrong = |_| D::Error::custom(format!("{} bytes instead of {}", bytes.len(), size_of::<T>()));
        T::read_from_bytes(&bytes).map(Plain).map_err(wrong)
    }
}

/// Bytes of any number, as digits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Digits(pub Vec<u8>);

impl Serialize for Digits {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&hex::encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for Digits {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let digits = std::borrow::Cow::<str>::deserialize(deserializer)?;
        hex::decode(&*digits).map(Digits).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use kvm_bindings::kvm_mp_state;

    use super::*;

    #[test]
    fn a_struct_is_its_bytes_and_no_other_number_of_them() {
        let text = serde_json::to_string(&Plain(kvm_mp_state { mp_state: 0x1234 })).unwrap();
        assert_eq!(text, "\"34120000\"");
        let back: Plain<kvm_mp_state> = serde_json::from_str(&text).unwrap();
        assert_eq!(back.0.mp_state, 0x1234);
        for wrong in ["\"\"", "\"341200\"", "\"3412000000\"", "\"3412000g\"", "\"34120000 \"", "7", "null"] {
            assert!(serde_json::from_str::<Plain<kvm_mp_state>>(wrong).is_err(), "{wrong}");
        }
    }
}
