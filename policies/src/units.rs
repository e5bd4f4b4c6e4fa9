//! The units that all other modules use. Addresses, sizes, indices and times do not mix: `Gpa + Bytes = Gpa`,
//! `Gpa - Gpa = Bytes`, and `Gpa + Gpa` does not compile.
//!
//! Arithmetic that exceeds 64 bits is a bug in this program, because sizes are validated where they enter, so it
//! panics. The `checked_*` forms are for values from outside.

use core::fmt;
use core::ops::{Add, AddAssign, Mul, Sub, SubAssign};
use core::time::Duration;

/// A size in bytes, never an address or a count of pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(u64);

impl Bytes {
    /// Zero bytes in size.
    pub const ZERO: Bytes = Bytes(0);

    /// Exactly `n` bytes.
    pub const fn new(n: u64) -> Bytes {
        Bytes(n)
    }

    /// The size as a number of bytes.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The size as `usize`, the unit of mappings in the process's own address space. The workspace is 64-bit only.
    pub const fn as_usize(self) -> usize {
        self.0 as usize
    }

    /// Whether the size is a whole number of pages of `size`.
    pub const fn is_multiple_of(self, size: PageSize) -> bool {
        self.0.is_multiple_of(size.bytes().0)
    }

    /// Number of pages of `size` needed to hold these bytes (rounds up).
    pub const fn pages(self, size: PageSize) -> u64 {
        self.0.div_ceil(size.bytes().0)
    }

    /// The next multiple of `size`, or `None` past 64 bits.
    pub const fn checked_round_up(self, size: PageSize) -> Option<Bytes> {
        match self.0.checked_next_multiple_of(size.bytes().0) {
            Some(n) => Some(Bytes(n)),
            None => None,
        }
    }

    /// `self - other`, or zero if that would be negative.
    pub const fn saturating_sub(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_sub(other.0))
    }

    /// `self + other`, or `None` past 64 bits.
    pub const fn checked_add(self, other: Bytes) -> Option<Bytes> {
        match self.0.checked_add(other.0) {
            Some(n) => Some(Bytes(n)),
            None => None,
        }
    }

    /// Parses a size that a user types: digits and an optional `K`, `M`, `G` or `T` (powers of 1024, either case,
    /// an `i`, `B` or `iB` may follow). A bare number is bytes. With a unit, decimals are allowed if the result is
    /// whole bytes: `1.5G`.
    ///
    /// # Errors
    /// Names the part of the text that is not a size, and the accepted form.
    pub fn parse(text: &str) -> Result<Bytes, ParseUnitError> {
        let (number, suffix) = split_digits(text);
        let number: u64 = number.parse().map_err(|_| ParseUnitError::NotASize)?;
        let (decimals, suffix) = match suffix.strip_prefix('.') {
            Some(behind) => split_digits(behind),
            None => ("0", suffix),
        };
        let suffix = suffix.strip_suffix("iB").or_else(|| suffix.strip_suffix('B')).unwrap_or(suffix);
        let shift = match suffix {
            "" if text.contains('.') => return Err(ParseUnitError::NotASize),
            "" => 0,
            "K" | "k" => 10,
            "M" | "m" => 20,
            "G" | "g" => 30,
            "T" | "t" => 40,
            _ => return Err(ParseUnitError::NotASize),
        };
        let whole = number.checked_mul(1 << shift).ok_or(ParseUnitError::TooLarge)?;
        whole.checked_add(part_of(decimals, 1 << shift)?).map(Bytes).ok_or(ParseUnitError::TooLarge)
    }
}

fn split_digits(text: &str) -> (&str, &str) {
    text.split_at(text.bytes().take_while(u8::is_ascii_digit).count())
}

/// `0.decimals` of a unit of at most 2^40 bytes. The product with nine decimals is below 2^70: too large for 64
/// bits, small enough for 128.
fn part_of(decimals: &str, unit: u64) -> Result<u64, ParseUnitError> {
    const DECIMALS_MAX: usize = 9;
    let places = decimals.len();
    if places > DECIMALS_MAX {
        return Err(ParseUnitError::NotASize);
    }
    let number: u64 = decimals.parse().map_err(|_| ParseUnitError::NotASize)?;
    let (product, whole) = (u128::from(number) * u128::from(unit), 10_u128.pow(places as u32));
    if product.is_multiple_of(whole) { Ok((product / whole) as u64) } else { Err(ParseUnitError::NotWhole) }
}

/// Size of `n` KiB.
pub const fn kib(n: u64) -> Bytes {
    Bytes(n << 10)
}

/// Size of `n` MiB.
pub const fn mib(n: u64) -> Bytes {
    Bytes(n << 20)
}

/// Size of `n` GiB.
pub const fn gib(n: u64) -> Bytes {
    Bytes(n << 30)
}

impl fmt::Display for Bytes {
    /// The largest unit that is exact; otherwise two decimals of the largest unit in which the value is
    /// at least one.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u64, &str); 4] = [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
        let n = self.0;
        let Some((unit, name)) = UNITS.into_iter().find(|(unit, _)| n >= *unit) else {
            return write!(f, "{n} B");
        };
        if n.is_multiple_of(unit) {
            write!(f, "{} {name}", n / unit)
        } else if let Some((exact, name)) =
            UNITS.into_iter().find(|(exact, _)| n.is_multiple_of(*exact) && n / exact < 10_000)
        {
            write!(f, "{} {name}", n / exact)
        } else {
            write!(f, "{:.2} {name}", n as f64 / unit as f64)
        }
    }
}

impl Add for Bytes {
    type Output = Bytes;
    fn add(self, other: Bytes) -> Bytes {
        Bytes(self.0 + other.0)
    }
}

impl AddAssign for Bytes {
    fn add_assign(&mut self, other: Bytes) {
        *self = *self + other;
    }
}

impl Sub for Bytes {
    type Output = Bytes;
    fn sub(self, other: Bytes) -> Bytes {
        Bytes(self.0 - other.0)
    }
}

impl SubAssign for Bytes {
    fn sub_assign(&mut self, other: Bytes) {
        *self = *self - other;
    }
}

impl Mul<u64> for Bytes {
    type Output = Bytes;
    fn mul(self, n: u64) -> Bytes {
        Bytes(self.0 * n)
    }
}

impl core::iter::Sum for Bytes {
    fn sum<I: Iterator<Item = Bytes>>(sizes: I) -> Bytes {
        sizes.fold(Bytes::ZERO, Add::add)
    }
}

/// Reason why a text is not in the expected unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParseUnitError {
    /// Not of the form `digits[K|M|G|T]`.
    NotASize,
    /// Decimals that leave a fraction of a byte.
    NotWhole,
    /// More bytes than fit 64 bits.
    TooLarge,
    /// Not one of `4k`, `2m`, `1g`.
    NotAPageSize,
}

impl fmt::Display for ParseUnitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotASize => "not a size: write a number with K, M, G or T after it (512M, 1.5G), or plain bytes",
            Self::NotWhole => "not a whole number of bytes: write it with the next smaller unit, K, M or G",
            Self::TooLarge => "larger than 64 bits can count: write a size below 16 EiB",
            Self::NotAPageSize => "not a page size: write 4k, 2m or 1g",
        })
    }
}

impl core::error::Error for ParseUnitError {}

/// The page sizes of x86-64, on either level of translation (SDM vol. 3, 4.5 and 29.3.2; APM vol. 2, 5.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PageSize {
    /// The base page, 4 KiB.
    Base4K,
    /// The huge page, 2 MiB.
    Huge2M,
    /// The giant page, 1 GiB.
    Giant1G,
}

impl PageSize {
    /// All sizes, smallest first.
    pub const ALL: [PageSize; 3] = [PageSize::Base4K, PageSize::Huge2M, PageSize::Giant1G];

    /// The size in bytes.
    pub const fn bytes(self) -> Bytes {
        match self {
            PageSize::Base4K => kib(4),
            PageSize::Huge2M => mib(2),
            PageSize::Giant1G => gib(1),
        }
    }

    /// The name on the command line and in every report: `4k`, `2m`, `1g`.
    pub const fn name(self) -> &'static str {
        match self {
            PageSize::Base4K => "4k",
            PageSize::Huge2M => "2m",
            PageSize::Giant1G => "1g",
        }
    }

    /// Parses [`PageSize::name`], either case.
    ///
    /// # Errors
    /// [`ParseUnitError::NotAPageSize`] for anything else.
    pub fn parse(text: &str) -> Result<PageSize, ParseUnitError> {
        Self::ALL.into_iter().find(|size| size.name().eq_ignore_ascii_case(text)).ok_or(ParseUnitError::NotAPageSize)
    }
}

impl fmt::Display for PageSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Number of base pages in one window.
pub const BASE_PAGES_PER_WINDOW: u16 = 512;

const _: () = assert!(
    PageSize::Huge2M.bytes().get() == PageSize::Base4K.bytes().get() * BASE_PAGES_PER_WINDOW as u64,
    "a window is exactly one table of 512 base-page entries"
);

macro_rules! address {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(u64);

        impl $name {
            /// The address with this number.
            pub const fn new(address: u64) -> $name {
                $name(address)
            }

            /// The address as a number.
            pub const fn get(self) -> u64 {
                self.0
            }

            /// Whether the address is a multiple of the page size.
            pub const fn is_aligned_to(self, size: PageSize) -> bool {
                self.0.is_multiple_of(size.bytes().get())
            }

            /// The largest multiple of the page size that is not above this address.
            pub const fn align_down(self, size: PageSize) -> $name {
                $name(self.0 - self.0 % size.bytes().get())
            }

            /// The smallest multiple of the page size that is not below this address, or `None` past 64 bits.
            pub const fn checked_align_up(self, size: PageSize) -> Option<$name> {
                match self.0.checked_next_multiple_of(size.bytes().get()) {
                    Some(address) => Some($name(address)),
                    None => None,
                }
            }

            /// `self + bytes`, or `None` past 64 bits.
            pub const fn checked_add(self, bytes: Bytes) -> Option<$name> {
                match self.0.checked_add(bytes.get()) {
                    Some(address) => Some($name(address)),
                    None => None,
                }
            }
        }

        impl Add<Bytes> for $name {
            type Output = $name;
            fn add(self, bytes: Bytes) -> $name {
                $name(self.0 + bytes.get())
            }
        }

        impl Sub<$name> for $name {
            type Output = Bytes;
            fn sub(self, other: $name) -> Bytes {
                Bytes(self.0 - other.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }
    };
}

address! {
    /// A guest-physical address.
    Gpa
}

address! {
    /// A host virtual address of the process that holds the guest's RAM.
    Hva
}

/// A guest frame number: a [`Gpa`] divided by 4 KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Gfn(u64);

impl Gfn {
    /// The frame that holds `gpa`.
    pub const fn containing(gpa: Gpa) -> Gfn {
        Gfn(gpa.get() / PageSize::Base4K.bytes().get())
    }

    /// The frame's number.
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// The index of a window in guest-physical space: its [`Gpa`] divided by 2 MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WindowIndex(u64);

impl WindowIndex {
    /// The window with this index.
    pub const fn new(index: u64) -> WindowIndex {
        WindowIndex(index)
    }

    /// The window that holds `gpa`.
    pub const fn containing(gpa: Gpa) -> WindowIndex {
        WindowIndex(gpa.get() / PageSize::Huge2M.bytes().get())
    }

    /// The index of the window.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The first address of the window.
    pub const fn start(self) -> Gpa {
        Gpa::new(self.0 * PageSize::Huge2M.bytes().get())
    }

    /// The number of the giant (1 GiB range) that holds the window.
    pub const fn giant(self) -> u64 {
        self.0 / 512
    }
}

impl fmt::Display for WindowIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "window {}", self.0)
    }
}

/// A share in hundredths of a percent (basis points): 10 000 is the whole. An integer, so that plans are the same
/// on every machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PerTenThousand(u32);

impl PerTenThousand {
    /// The whole: 10 000 ten-thousandths.
    pub const ALL: PerTenThousand = PerTenThousand(10_000);

    /// A share of `n` ten-thousandths.
    pub const fn new(n: u32) -> PerTenThousand {
        PerTenThousand(n)
    }

    /// `part` of `whole`, rounded down; zero if `whole` is zero.
    pub const fn of(part: u64, whole: u64) -> PerTenThousand {
        if whole == 0 {
            return PerTenThousand(0);
        }
        PerTenThousand((part as u128 * 10_000 / whole as u128) as u32)
    }

    /// The share as a number of ten-thousandths.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The share as a fraction: for reports, never for decisions.
    pub fn as_fraction(self) -> f64 {
        f64::from(self.0) / 10_000.0
    }
}

impl fmt::Display for PerTenThousand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:02} %", self.0 / 100, self.0 % 100)
    }
}

/// A point in time: the time since the manager's start. Policies receive it and never read a clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment(Duration);

impl Moment {
    /// The manager's start.
    pub const START: Moment = Moment(Duration::ZERO);

    /// The moment at this time after the start.
    pub const fn after_start(since: Duration) -> Moment {
        Moment(since)
    }

    /// Time from the start to this moment.
    pub const fn since_start(self) -> Duration {
        self.0
    }

    /// The time from `earlier` to this moment; zero if `earlier` is later.
    pub const fn since(self, earlier: Moment) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<Duration> for Moment {
    type Output = Moment;
    fn add(self, time: Duration) -> Moment {
        Moment(self.0 + time)
    }
}
