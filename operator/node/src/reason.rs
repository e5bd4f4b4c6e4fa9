//! Why the API server could not be reached, down to the first cause.

use std::error::Error;
use std::io;

use rustls::CertificateError::{Expired, ExpiredContext, NotValidYet, NotValidYetContext};

/// Text of an error with its causes, each after a colon. A cause is left out if an earlier text has its words. Where a
/// certificate is not valid at this node's time, the text names the clocks: one of them is wrong more often than a
/// certificate is.
pub fn with_causes(error: &(dyn Error + 'static)) -> String {
    let mut text = String::new();
    let mut is_about_time = false;
    let mut next = Some(error);
    while let Some(cause) = next {
        let line = cause.to_string().replace('\n', " ");
        if text.is_empty() {
            text = line;
        } else if !text.contains(&line) {
            text = format!("{text}: {line}");
        }
        is_about_time |= is_out_of_date(cause);
        next = cause.source();
    }
    if is_about_time {
        text.push_str("; compare the clocks of this node and of the control plane, then the certificate's dates");
    }
    text
}

/// Whether a certificate is refused for its dates. TLS errors are inside of I/O errors, which may be inside of others.
fn is_out_of_date(error: &(dyn Error + 'static)) -> bool {
    if let Some(inner) = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
        return is_out_of_date(inner);
    }
    matches!(
        error.downcast_ref(),
        Some(rustls::Error::InvalidCertificate(
            Expired | ExpiredContext { .. } | NotValidYet | NotValidYetContext { .. }
        ))
    )
}

#[cfg(test)]
mod tests {
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
        let other = text(rustls::CertificateError::UnknownIssuer);
        assert!(other.contains("UnknownIssuer") && !other.contains("clocks"), "{other}");
    }
}
