//! Pictures as SVG, drawn by plotters. No information depends on colour alone, so the pictures work in grey print
//! and for colour-blind readers.
//!
//! ```text
//!   Bars ─▶ bars ──┐
//!   Lines ─▶ lines ─┼─▶ canvas: caption, legend, axis ──▶ SVG
//!   Map ─▶ map ────┤    palette: colours and their darkness
//!   Boxes ─▶ boxes ─┘
//! ```

use crate::report::Plot;

mod bars;
mod boxes;
mod canvas;
mod lines;
mod map;
mod palette;

/// The picture as a whole SVG document.
pub fn svg(plot: &Plot) -> String {
    match plot {
        Plot::Bars(bars) => bars::draw(bars),
        Plot::Lines(lines) => lines::draw(lines),
        Plot::Boxes(boxes) => boxes::draw(boxes),
        Plot::Map(map) => map::draw(map),
    }
}

#[cfg(test)]
mod tests;
