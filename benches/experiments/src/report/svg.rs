//! Pictures as SVG, drawn by plotters: nothing in them depends on colour alone, so that they can be read in grey print and by the
//! colour-blind.
//!
//! ```text
//!   Bars ─▶ bars ──┐
//!   Lines ─▶ lines ─┼─▶ canvas: caption, legend, axis ──▶ SVG
//!   Map ─▶ map ────┘    palette: which colour, how dark
//! ```

use crate::report::Plot;

mod bars;
mod canvas;
mod lines;
mod map;
mod palette;

/// The picture: a whole SVG document.
pub fn svg(plot: &Plot) -> String {
    match plot {
        Plot::Bars(bars) => bars::draw(bars),
        Plot::Lines(lines) => lines::draw(lines),
        Plot::Map(map) => map::draw(map),
    }
}

#[cfg(test)]
mod tests;
