//! Why the API server could not be reached, down to the first cause.

use std::error::Error;
use std::io;

use rustls::CertificateError::{Expired, ExpiredContext, NotValidYet, NotValidYetContext};

/// Text of an error with its causes, each after a colon. A cause is left out if an earlier text has its words. Where a
/// certificate is not valid at this node's time, the text names the clocks: one of them is wrong more often than a
/// certificate is. It then has no time in it: errors of the same cause have the same text, which is logged once.
pub fn with_causes(error: &(dyn Error + 'static)) -> String {
    let mut text = String::new();
    let mut next = Some(error);
    while let Some(cause) = next {
        if let Some(why) = wrong_date(cause) {
            let clocks = "compare the clocks of this node and of the control plane, then the certificate's dates";
            return format!("{text}: invalid peer certificate: {why}; {clocks}");
        }
        let line = cause.to_string().replace('\n', " ");
        if text.is_empty() {
            text = line;
        } else if !text.contains(&line) {
            text = format!("{text}: {line}");
        }
        next = cause.source();
    }
    text
}

/// The mistake in a certificate's dates. TLS errors are inside of I/O errors, which may be inside of other errors.
fn wrong_date(error: &(dyn Error + 'static)) -> Option<&'static str> {
    if let Some(inner) = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
        return wrong_date(inner);
    }
    let rustls::Error::InvalidCertificate(why) = error.downcast_ref()? else { return None };
    match why {
        Expired | ExpiredContext { .. } => Some("certificate expired"),
        NotValidYet | NotValidYetContext { .. } => Some("certificate not valid yet"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rustls::pki_types::UnixTime;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{text}")]
    struct Layer {
        text: &'static str,
        source: Option<io::Error>,
    }

    #[test]
    fn each_cause_is_named_once() {
        let refused = || io::Error::new(io::ErrorKind::ConnectionRefused, "refused");
        let layer = |text| Layer { text, source: Some(refused()) };
        assert_eq!(with_causes(&layer("cannot connect")), "cannot connect: refused");
        assert_eq!(with_causes(&layer("cannot connect: refused")), "cannot connect: refused");
    }

    #[test]
    fn dates_of_a_certificate_name_the_clocks_and_other_mistakes_in_it_do_not() {
        let text = |why| {
            let source = Some(io::Error::other(rustls::Error::InvalidCertificate(why)));
            with_causes(&Layer { text: "cannot connect", source })
        };
        for why in [Expired, NotValidYet] {
            assert!(text(why).contains("compare the clocks"));
        }
        let expired_at = |seconds| {
            let [time, not_after] =
                [seconds, 1].map(|seconds| UnixTime::since_unix_epoch(Duration::from_secs(seconds)));
            text(ExpiredContext { time, not_after })
        };
        assert_eq!(expired_at(2), expired_at(3), "the same mistake is logged once");
        let other = text(rustls::CertificateError::UnknownIssuer);
        assert!(other.contains("UnknownIssuer") && !other.contains("clocks"), "{other}");
    }
}
