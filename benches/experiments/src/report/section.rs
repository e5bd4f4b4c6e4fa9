//! What a report is made of: sections of sentences, tables and pictures, as data. Experiments make them, and each form
//! of a report draws them.

use wideleaf_measure::table::Table;

pub use wideleaf_measure::table::Column;

use crate::results::MemoryMap;

/// A part of a report.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Section {
    /// Heading of the section.
    pub title: String,
    /// Paragraphs of the section.
    pub paragraphs: Vec<String>,
    /// Tables of the section.
    pub tables: Vec<Grid>,
    /// Pictures of the section.
    pub plots: Vec<Plot>,
}

/// A table with text cells.
pub type Grid = Table<String>;

/// A picture as data.
#[derive(Clone, Debug, PartialEq)]
pub enum Plot {
    /// Bars in groups, each with its interval.
    Bars(Bars),
    /// Lines over time.
    Lines(Lines),
    /// Guest-physical memory by window and time.
    Map(MapPlot),
    /// Groups of boxes with a number and a shade.
    Boxes(Boxes),
}

/// Bars in groups.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Bars {
    /// Short name for the file: `ratios`.
    pub name: String,
    /// Caption of the picture.
    pub caption: String,
    /// Title of the axis, with its unit.
    pub axis: String,
    /// Value with a line through all bars: 1 for ratios.
    pub reference: Option<f64>,
    /// Names of the colours, in the order of the bars of a group.
    pub series: Vec<String>,
    /// Groups from top to bottom.
    pub groups: Vec<BarGroup>,
}

/// A group of bars.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BarGroup {
    /// Label of the group.
    pub name: String,
    /// One bar per series: value, lower end, upper end. `None` for a missing bar.
    pub bars: Vec<Option<(f64, f64, f64)>>,
}

/// Lines over time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Lines {
    /// Short name for the file.
    pub name: String,
    /// Caption of the picture.
    pub caption: String,
    /// Title of the horizontal axis, with its unit.
    pub x_axis: String,
    /// Title of the vertical axis, with its unit.
    pub y_axis: String,
    /// Upper end of the vertical axis, if it is not the highest point: 100 for percent.
    pub y_max: Option<f64>,
    /// Lines as pairs of name and points.
    pub lines: Vec<(String, Vec<(f64, f64)>)>,
}

/// Groups of boxes in rows and columns.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Boxes {
    /// Short name for the file.
    pub name: String,
    /// Caption of the picture.
    pub caption: String,
    /// Names of the columns of groups.
    pub columns: Vec<String>,
    /// Names of the rows, and of the columns, of the boxes of a group.
    pub inner: Vec<String>,
    /// Texts that explain shades, with their shares.
    pub legend: Vec<(String, f64)>,
    /// Name of each row of groups, and its groups: boxes line by line.
    pub rows: Vec<(String, Vec<Vec<Option<BoxOf>>>)>,
    /// Whether the numbers are simulated: they then look different from measured ones.
    pub is_simulated: bool,
}

/// A box of [`Boxes`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BoxOf {
    /// Text of the box.
    pub text: String,
    /// Share from 0 (light) to 1 (dark).
    pub shade: f64,
}

/// First character of a table cell with a simulated number. Every form of a report shows such a cell differently from
/// a measured one.
const SIMULATED: char = '~';

/// The text of a cell, marked as simulated.
pub fn simulated(text: &str) -> String {
    format!("{SIMULATED}{text}")
}

/// Whether the text of a cell is marked as simulated.
pub(super) fn is_simulated(cell: &str) -> bool {
    cell.starts_with(SIMULATED)
}

/// A map of memory over time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MapPlot {
    /// Short name for the file.
    pub name: String,
    /// Caption of the picture.
    pub caption: String,
    /// Backing of the windows over time.
    pub map: MemoryMap,
}

impl Plot {
    /// Short name for the file.
    pub fn name(&self) -> &str {
        match self {
            Plot::Bars(Bars { name, .. })
            | Plot::Lines(Lines { name, .. })
            | Plot::Map(MapPlot { name, .. })
            | Plot::Boxes(Boxes { name, .. }) => name,
        }
    }

    /// Caption of the picture.
    pub fn caption(&self) -> &str {
        match self {
            Plot::Bars(Bars { caption, .. })
            | Plot::Lines(Lines { caption, .. })
            | Plot::Map(MapPlot { caption, .. })
            | Plot::Boxes(Boxes { caption, .. }) => caption,
        }
    }
}
