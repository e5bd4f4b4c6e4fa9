//! Values of options that several commands share: sizes, times, the format of the output. Parsing touches nothing, and
//! an error names what is allowed.

use std::time::Duration;

use clap::ValueEnum;
use wideleaf_policies::Bytes;

/// Argument of `--format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FormatArg {
    /// Table for people
    Table,
    /// JSON for programs
    Json,
}

/// As [`Bytes::parse`], but refuses zero.
pub fn parse_some_bytes(text: &str) -> Result<Bytes, String> {
    match Bytes::parse(text).map_err(|error| error.to_string())? {
        Bytes::ZERO => Err("the size is zero: write at least one byte".into()),
        bytes => Ok(bytes),
    }
}

/// Parses `250ms`, `10s`, `2m`, `1h`. A bare number means seconds, as in timeout(1) and sleep(1).
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    const FORM: &str = "not a time: write a whole number of seconds, or one followed by ms, s, m or h (10, 250ms, 2m)";
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| FORM)?;
    let milliseconds = match unit {
        "ms" => Some(number),
        "" | "s" => number.checked_mul(1_000),
        "m" => number.checked_mul(60_000),
        "h" => number.checked_mul(3_600_000),
        _ => return Err(FORM.into()),
    };
    milliseconds.map(Duration::from_millis).ok_or_else(|| "the time is too long: use fewer hours".into())
}

/// As [`parse_duration`], but refuses zero.
pub fn parse_timeout(text: &str) -> Result<Duration, String> {
    some_time(text, "omit --timeout to wait without a limit")
}

/// As [`parse_duration`], but refuses zero and then names the remedy.
pub fn some_time(text: &str, remedy: &str) -> Result<Duration, String> {
    match parse_duration(text)? {
        Duration::ZERO => Err(format!("the time is zero: {remedy}")),
        time => Ok(time),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_a_unit() {
        assert_eq!(parse_duration("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(parse_duration("2m"), Ok(Duration::from_secs(120)));
        assert!(parse_timeout("0s").is_err());
        assert_eq!(parse_duration("5"), Ok(Duration::from_secs(5)));
        for wrong in ["", "s", "-1s", "1.5s", "1 s", "99999999999999999999s"] {
            assert!(parse_duration(wrong).is_err(), "{wrong:?}");
        }
    }
}
