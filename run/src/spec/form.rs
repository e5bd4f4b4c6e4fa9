//! The written form of values from crates without serde: units as numbers, names as text. Reading one opens no file.

use std::path::PathBuf;
use std::time::Duration;

use serde::de::{Deserialize, Deserializer, Error as _};
use serde::ser::{Serialize, Serializer};
use wideleaf_control::view::{Guarantee, GuaranteeError};
use wideleaf_kernels::registry::{KernelNames, by_name};
use wideleaf_memory::manager::{OutOfReach, OutOfReachError};
use wideleaf_memory::numa::placement::MemoryMode;
use wideleaf_memory::{BackingConfig, BackingKind};
use wideleaf_policies::node::ListError;
use wideleaf_policies::{Bytes, CpuList, NodeSet, PageSize, PolicyChoice};
use wideleaf_vmm::devices::virtio::net::Mac;
use wideleaf_vmm::sandbox::User;

use super::{RestoreReads, Workload};

/// A value with a form of one scalar.
pub(super) trait Scalar: Sized {
    /// The form: a number or a text.
    type Form: Serialize + for<'de> Deserialize<'de>;

    /// The form of this value.
    fn form(&self) -> Self::Form;

    /// The value of this form, or the reason why the form is invalid.
    fn of(form: Self::Form) -> Result<Self, String>;
}

/// A number of bytes.
impl Scalar for Bytes {
    type Form = u64;

    fn form(&self) -> u64 {
        self.get()
    }

    fn of(bytes: u64) -> Result<Bytes, String> {
        Ok(Bytes::new(bytes))
    }
}

/// Seconds, with decimals. They are exact to the nanosecond up to a hundred days.
impl Scalar for Duration {
    type Form = f64;

    fn form(&self) -> f64 {
        self.as_secs_f64()
    }

    fn of(seconds: f64) -> Result<Duration, String> {
        Duration::try_from_secs_f64(seconds).map_err(|error| format!("{seconds} is no time in seconds: {error}"))
    }
}

/// `4k`, `2m` or `1g`.
impl Scalar for PageSize {
    type Form = String;

    fn form(&self) -> String {
        self.name().to_owned()
    }

    fn of(text: String) -> Result<PageSize, String> {
        PageSize::parse(&text).map_err(|error| error.to_string())
    }
}

/// `name` or `name:key=value,…`.
impl Scalar for PolicyChoice {
    type Form = String;

    fn form(&self) -> String {
        self.to_string()
    }

    fn of(text: String) -> Result<PolicyChoice, String> {
        PolicyChoice::parse(&text).map_err(|error| error.to_string())
    }
}

/// `bestEffort`, `95%` or `bestEffort:95%`.
impl Scalar for Guarantee {
    type Form = String;

    fn form(&self) -> String {
        self.to_string()
    }

    fn of(text: String) -> Result<Guarantee, String> {
        text.parse().map_err(|error: GuaranteeError| error.to_string())
    }
}

/// `30%`.
impl Scalar for OutOfReach {
    type Form = String;

    fn form(&self) -> String {
        self.to_string()
    }

    fn of(text: String) -> Result<OutOfReach, String> {
        text.parse().map_err(|error: OutOfReachError| error.to_string())
    }
}

/// Six bytes in hexadecimal: `02:00:00:00:00:01`.
impl Scalar for Mac {
    type Form = String;

    fn form(&self) -> String {
        self.to_string()
    }

    fn of(text: String) -> Result<Mac, String> {
        text.parse().map_err(|error: wideleaf_vmm::devices::virtio::net::MacError| error.to_string())
    }
}

/// The kernel's list format: `0-1,3`.
impl Scalar for CpuList {
    type Form = String;

    fn form(&self) -> String {
        self.to_string()
    }

    fn of(text: String) -> Result<CpuList, String> {
        text.parse().map_err(|error: ListError| error.to_string())
    }
}

/// The kernel's list format: `0-1,3`.
impl Scalar for NodeSet {
    type Form = String;

    fn form(&self) -> String {
        self.to_string()
    }

    fn of(text: String) -> Result<NodeSet, String> {
        text.parse().map_err(|error: ListError| error.to_string())
    }
}

/// `bind`, `preferred` or `interleave`.
impl Scalar for MemoryMode {
    type Form = String;

    fn form(&self) -> String {
        self.name().to_owned()
    }

    fn of(text: String) -> Result<MemoryMode, String> {
        let none = || format!("there is no memory policy {text:?}: use bind, preferred or interleave");
        MemoryMode::by_name(&text).ok_or_else(none)
    }
}

/// `UID:GID`.
impl Scalar for User {
    type Form = String;

    fn form(&self) -> String {
        self.to_string()
    }

    fn of(text: String) -> Result<User, String> {
        User::from_numbers(&text).map_err(|_| format!("cannot use the user {text:?}: write UID:GID, two numbers"))
    }
}

/// A value that is always present: `#[serde(with = "form::scalar")]`.
pub(super) mod scalar {
    use serde::de::{Deserialize as _, Error as _};
    use serde::ser::Serialize as _;

    use super::{Deserializer, Scalar, Serializer};

    pub(crate) fn serialize<T: Scalar, S: Serializer>(value: &T, to: S) -> Result<S::Ok, S::Error> {
        value.form().serialize(to)
    }

    pub(crate) fn deserialize<'de, T: Scalar, D: Deserializer<'de>>(from: D) -> Result<T, D::Error> {
        T::of(T::Form::deserialize(from)?).map_err(D::Error::custom)
    }
}

/// A value that may be missing: `#[serde(default, with = "form::optional")]`.
pub(super) mod optional {
    use serde::de::{Deserialize as _, Error as _};
    use serde::ser::Serialize as _;

    use super::{Deserializer, Scalar, Serializer};

    pub(crate) fn serialize<T: Scalar, S: Serializer>(value: &Option<T>, to: S) -> Result<S::Ok, S::Error> {
        value.as_ref().map(Scalar::form).serialize(to)
    }

    pub(crate) fn deserialize<'de, T: Scalar, D: Deserializer<'de>>(from: D) -> Result<Option<T>, D::Error> {
        Option::<T::Form>::deserialize(from)?.map(T::of).transpose().map_err(D::Error::custom)
    }
}

/// A value that must be present, although it may be `null`: without this, serde takes a missing one as `None`.
pub(super) fn present<'de, T: Deserialize<'de>, D: Deserializer<'de>>(from: D) -> Result<Option<T>, D::Error> {
    Option::deserialize(from)
}

/// The way in which a restore reads, or `true` for [`RestoreReads::Direct`] and `false` for the default: snapshots of
/// earlier builds have that form.
pub(super) fn restore_reads<'de, D: Deserializer<'de>>(from: D) -> Result<RestoreReads, D::Error> {
    #[derive(serde::Deserialize)]
    #[serde(untagged)]
    enum Form {
        Way(RestoreReads),
        IsDirect(bool),
    }
    Ok(match Form::deserialize(from)? {
        Form::Way(reads) => reads,
        Form::IsDirect(true) => RestoreReads::Direct,
        Form::IsDirect(false) => RestoreReads::default(),
    })
}

/// Form of a [`Workload`].
#[derive(serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
enum WorkloadForm {
    Kernel(String),
    Image(PathBuf),
}

impl Serialize for Workload {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Workload::Kernel(name) => WorkloadForm::Kernel((*name).to_owned()),
            Workload::Image(path) => WorkloadForm::Image(path.clone()),
        }
        .serialize(to)
    }
}

impl<'de> Deserialize<'de> for Workload {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Workload, D::Error> {
        let name = match WorkloadForm::deserialize(from)? {
            WorkloadForm::Image(path) => return Ok(Workload::Image(path)),
            WorkloadForm::Kernel(name) => name,
        };
        match by_name(&name) {
            Some(kernel) => Ok(Workload::Kernel(kernel.name.as_str())),
            None => {
                let names = KernelNames::ALL;
                Err(D::Error::custom(format_args!("unknown kernel {name:?}; the kernels are {names}")))
            }
        }
    }
}

/// Form of a [`BackingConfig`].
#[derive(serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct BackingForm {
    kind: BackingKind,
    #[serde(with = "scalar")]
    start_page: PageSize,
    #[serde(default)]
    is_reservable: bool,
}

/// Kind and initial page size: `#[serde(with = "form::backing")]`.
pub(super) mod backing {
    use serde::de::{Deserialize as _, Error as _};
    use serde::ser::Serialize as _;

    use super::{BackingConfig, BackingForm, Deserializer, Serializer};

    pub(crate) fn serialize<S: Serializer>(backing: &BackingConfig, to: S) -> Result<S::Ok, S::Error> {
        let (kind, start_page, is_reservable) = (backing.kind(), backing.start_page(), backing.is_reservable());
        BackingForm { kind, start_page, is_reservable }.serialize(to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<BackingConfig, D::Error> {
        let BackingForm { kind, start_page, is_reservable } = BackingForm::deserialize(from)?;
        let plain = BackingConfig::new(kind, start_page).map_err(D::Error::custom)?;
        let reservable = BackingConfig::reservable();
        match is_reservable {
            false => Ok(plain),
            true if (kind, start_page) == (reservable.kind(), reservable.start_page()) => Ok(reservable),
            true => Err(D::Error::custom("frames can be reserved only for memfd RAM on 4k pages")),
        }
    }
}
