//! What results say, for people: sections of sentences, tables and pictures, made once and rendered as text, Markdown or HTML.
//!
//! ```text
//!   Results ──▶ the experiment's own sections ─┐
//!           └─▶ what every report has ─────────┴▶ Report ──▶ text | markdown | html (with the pictures inside) | svg files
//! ```

use crate::catalogue;
use crate::results::Results;

mod agreement;
pub mod every;
#[cfg(test)]
pub(crate) mod fixture;
pub mod html;
pub mod markdown;
pub mod svg;
#[cfg(test)]
mod tests;
pub mod text;

/// A whole report.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// Its heading.
    pub title: String,
    /// What was asked, and, in its first paragraph, whatever did not come as promised.
    pub lead: Vec<String>,
    /// Its parts.
    pub sections: Vec<Section>,
}

/// A part of a report.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Section {
    /// Its heading.
    pub title: String,
    /// Sentences, a paragraph each.
    pub paragraphs: Vec<String>,
    /// Its tables.
    pub tables: Vec<Grid>,
    /// Its pictures.
    pub plots: Vec<Plot>,
}

/// A table.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Grid {
    /// What it shows.
    pub caption: String,
    /// Headings, with their units.
    pub columns: Vec<Column>,
    /// Cells, as they are printed.
    pub rows: Vec<Vec<String>>,
}

/// A column of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Column {
    /// Its heading.
    pub title: String,
    /// Whether its cells are numbers, which stand to the right.
    pub is_number: bool,
}

impl Column {
    /// Of words.
    pub fn text(title: impl Into<String>) -> Column {
        Column { title: title.into(), is_number: false }
    }

    /// Of numbers.
    pub fn number(title: impl Into<String>) -> Column {
        Column { title: title.into(), is_number: true }
    }
}

/// A picture, as data.
#[derive(Clone, Debug, PartialEq)]
pub enum Plot {
    /// Bars in groups, each with its interval.
    Bars(Bars),
    /// Lines over time.
    Lines(Lines),
    /// Guest-physical memory by window and time.
    Map(MapPlot),
}

/// Bars in groups.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Bars {
    /// A word or two for its file: `ratios`.
    pub name: String,
    /// What it shows.
    pub caption: String,
    /// What the axis counts, with its unit.
    pub axis: String,
    /// Where a line is drawn through all bars: 1 for ratios.
    pub reference: Option<f64>,
    /// What the colours stand for, in the order of the bars of a group.
    pub series: Vec<String>,
    /// Groups from top to bottom.
    pub groups: Vec<BarGroup>,
}

/// Bars that stand together.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BarGroup {
    /// What is written beside it.
    pub name: String,
    /// A bar for each of the series: where it is, from where to where it may be. `None` where there is nothing.
    pub bars: Vec<Option<(f64, f64, f64)>>,
}

/// Lines over time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Lines {
    /// A word or two for its file.
    pub name: String,
    /// What it shows.
    pub caption: String,
    /// What goes to the right, with its unit.
    pub x_axis: String,
    /// What goes up, with its unit.
    pub y_axis: String,
    /// What it goes up to, where that is not where the highest line does: 100 for percent.
    pub y_max: Option<f64>,
    /// Lines: name, points.
    pub lines: Vec<(String, Vec<(f64, f64)>)>,
}

/// A map of memory over time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MapPlot {
    /// A word or two for its file.
    pub name: String,
    /// What it shows.
    pub caption: String,
    /// What was seen.
    pub map: crate::results::MemoryMap,
}

impl Plot {
    /// A word or two for its file.
    pub fn name(&self) -> &str {
        match self {
            Plot::Bars(Bars { name, .. }) | Plot::Lines(Lines { name, .. }) | Plot::Map(MapPlot { name, .. }) => name,
        }
    }

    /// What it shows.
    pub fn caption(&self) -> &str {
        match self {
            Plot::Bars(Bars { caption, .. })
            | Plot::Lines(Lines { caption, .. })
            | Plot::Map(MapPlot { caption, .. }) => caption,
        }
    }
}

impl Report {
    /// What these results say.
    pub fn of(results: &Results) -> Report {
        let experiment = &results.experiment;
        let known = catalogue::by_name(&experiment.name);
        let own = known.map(|known| known.sections(results)).unwrap_or_default();
        let own_lead = known.map(|known| known.lead(results)).unwrap_or_default();
        let lead = [
            own_lead,
            every::lead(results),
            every::summary(results, known.map_or("the figure", |known| known.figure())),
            vec![experiment.question.clone(), every::evidence(results)],
        ]
        .concat();
        Report { title: experiment.title.clone(), lead, sections: [own, every::sections(results)].concat() }
    }

    /// Its pictures in their order, each with the name of its file. The number keeps names apart.
    pub fn pictures(&self) -> Vec<(String, &Plot)> {
        let plots = self.sections.iter().flat_map(|section| &section.plots).enumerate();
        plots.map(|(index, plot)| (format!("{:02}-{}.svg", index + 1, file_word(plot.name())), plot)).collect()
    }
}

/// A name without what shells and file systems give a meaning.
fn file_word(name: &str) -> String {
    name.chars().map(|c| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' }).collect()
}
