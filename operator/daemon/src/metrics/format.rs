//! The two forms of a scrape's text, and the choice between them by a client's request (RFC 9110, 12.5.1).
//!
//! | | OpenMetrics 1.0 | classic (Prometheus' text format 0.0.4) |
//! |---|---|---|
//! | `# HELP`, `# TYPE` of a counter | the family's name | the name of its rows, with `_total` |
//! | the end | `# EOF` | nothing |
//!
//! Prometheus asks for OpenMetrics. promtool, curl and other collectors get the classic form, which all of them read.

use super::FAMILIES;

/// Form of the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// The form that Prometheus asks for.
    OpenMetrics,
    /// The form that every client reads.
    Classic,
}

/// Supported version of OpenMetrics.
const VERSION: &str = "1.0.0";

impl Format {
    /// Media type of the form.
    pub(super) const fn content_type(self) -> &'static str {
        match self {
            Format::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Format::Classic => "text/plain; version=0.0.4; charset=utf-8",
        }
    }

    /// The form that the values of a request's `Accept` headers prefer: OpenMetrics if they name it and do not
    /// prefer plain text.
    pub(super) fn wanted<'a>(accept: impl Iterator<Item = &'a str>) -> Format {
        let (mut open_metrics, mut plain) = (0.0, 0.0);
        for range in accept.flat_map(|value| value.split(',')) {
            let mut parts = range.split(';').map(str::trim);
            let media = parts.next().unwrap_or_default().to_ascii_lowercase();
            let (mut quality, mut version) = (1.0, VERSION);
            for (name, value) in parts.filter_map(|part| part.split_once('=')) {
                match name.trim() {
                    "q" => quality = value.trim().parse().unwrap_or(0.0),
                    "version" => version = value.trim().trim_matches('"'),
                    _ => {}
                }
            }
            match media.as_str() {
                "application/openmetrics-text" if version == VERSION => open_metrics = f32::max(open_metrics, quality),
                "text/plain" => plain = f32::max(plain, quality),
                _ => {}
            }
        }
        if open_metrics > 0.0 && open_metrics >= plain { Format::OpenMetrics } else { Format::Classic }
    }
}

/// The classic form of a text of [`FAMILIES`] in OpenMetrics' form.
pub(super) fn classic(open_metrics: &str) -> String {
    let mut text = String::with_capacity(open_metrics.len() + FAMILIES.len() * "_total_total".len());
    for line in open_metrics.lines().filter(|line| *line != "# EOF") {
        match described(line) {
            Some((what, name, rest)) => text.extend(["# ", what, " ", row_name(name).as_str(), " ", rest, "\n"]),
            None => text.extend([line, "\n"]),
        }
    }
    text
}

/// Keyword, name and rest of a line that describes a family.
fn described(line: &str) -> Option<(&str, &str, &str)> {
    let (what, rest) = line.strip_prefix("# ")?.split_once(' ')?;
    let (name, rest) = rest.split_once(' ')?;
    Some((what, name, rest))
}

fn row_name(family: &str) -> String {
    FAMILIES.iter().find(|known| known.name == family).map_or_else(|| family.to_owned(), super::Family::row_name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_metrics_is_for_clients_that_ask_for_it_and_prefer_it() {
        // The headers of Prometheus 2.42 and 3.0.
        let prometheus_2 = "application/openmetrics-text;version=1.0.0,\
                            application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        let prometheus_3 = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,\
                            application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;q=0.3,*/*;q=0.1";
        for accept in [
            prometheus_2,
            prometheus_3,
            "Application/OpenMetrics-Text",
            "application/openmetrics-text;version=\"1.0.0\"",
        ] {
            assert_eq!(Format::wanted([accept].into_iter()), Format::OpenMetrics, "{accept}");
        }
        for accept in [
            "",
            "*/*",
            "text/plain",
            "text/plain, application/openmetrics-text;q=0.5",
            "application/openmetrics-text;q=0",
            "application/openmetrics-text;version=0.0.1",
            "application/openmetrics-text;q=x",
        ] {
            assert_eq!(Format::wanted([accept].into_iter()), Format::Classic, "{accept}");
        }
    }
}
