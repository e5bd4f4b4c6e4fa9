//! Reports for people, made from results: sections of sentences, tables and pictures. One report renders as
//! text, Markdown or HTML.
//!
//! ```text
//!   Results ──▶ the experiment's own sections ─┐
//!           └─▶ sections of every report ─────┴▶ Report ──▶ text | markdown | html (with its pictures) | svg files
//! ```

use crate::catalogue;
use crate::results::Results;

mod agreement;
pub mod common_sections;
#[cfg(test)]
pub(crate) mod fixture;
pub mod html;
pub mod markdown;
mod numbers;
mod section;
pub mod svg;
#[cfg(test)]
mod tests;
pub mod text;

use section::is_simulated;
pub use section::{BarGroup, Bars, BoxOf, Boxes, Column, Grid, Lines, MapPlot, Plot, Section, simulated};

/// A whole report.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// Heading of the report.
    pub title: String,
    /// Failures and surprises in the first paragraphs, then the question.
    pub lead: Vec<String>,
    /// Sections of the report.
    pub sections: Vec<Section>,
}

impl Report {
    /// The report of these results.
    pub fn of(results: &Results) -> Report {
        let experiment = &results.experiment;
        let known = catalogue::by_name(&experiment.name);
        let own = known.map(|known| known.sections(results)).unwrap_or_default();
        let own_lead = known.map(|known| known.lead(results)).unwrap_or_default();
        let lead = [
            own_lead,
            common_sections::lead(results),
            common_sections::summary(results, known.map_or("the figure", |known| known.figure())),
            vec![experiment.question.clone(), common_sections::evidence(results)],
        ]
        .concat();
        let common = match known.is_some_and(|known| known.has_all_figures()) {
            true => common_sections::sections_without_cells(results),
            false => common_sections::sections(results),
        };
        Report { title: experiment.title.clone(), lead, sections: [own, common].concat() }
    }

    /// Pictures in their order, each with its file name. The number makes the names unique.
    pub fn pictures(&self) -> Vec<(String, &Plot)> {
        let plots = self.sections.iter().flat_map(|section| &section.plots).enumerate();
        plots.map(|(index, plot)| (format!("{:02}-{}.svg", index + 1, file_word(plot.name())), plot)).collect()
    }
}

/// A name with only the characters that are safe in shells and file systems.
fn file_word(name: &str) -> String {
    name.chars().map(|c| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' }).collect()
}
