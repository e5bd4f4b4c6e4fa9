//! Common elements of all pictures: rectangles, lines and text at pixel positions, a caption, a legend, an axis.

use plotters::backend::SVGBackend;
use plotters::coord::Shift;
use plotters::coord::ranged1d::Ranged;
use plotters::coord::types::RangedCoordf64;
use plotters::drawing::{DrawingArea, IntoDrawingArea};
use plotters::element::{DashedPathElement, Drawable, PathElement, PointCollection, Rectangle, Text};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color, IntoFont, RGBColor, ShapeStyle, TextStyle};

use super::palette::{GREY, INK, PALE, PAPER};
use crate::report::common_sections::decimals;

/// Width of every picture in pixels, readable on an A4 page without magnification.
pub(super) const WIDTH: i32 = 960;
/// White margin around a picture.
pub(super) const MARGIN: i32 = 14;
/// Height of the caption's letters.
pub(super) const CAPTION_PX: i32 = 16;
/// Height of all other letters.
pub(super) const TEXT_PX: i32 = 13;
/// Distance between two lines of text.
pub(super) const LINE: i32 = 19;
/// Factor between plotters' unit of font size and SVG's.
const FONT_SIZE_OF_PLOTTERS: f64 = 1.24;
/// Width of a letter relative to its height. Capitals and digits have this width in common sans-serif fonts; most
/// other letters are narrower.
const LETTER_WIDTH: f64 = 0.62;

/// A place in pixels from the upper left corner.
pub(super) type Point = (i32, i32);

/// A picture in progress.
pub(super) struct Canvas<'a>(DrawingArea<SVGBackend<'a>, Shift>);

/// The picture that `draw` draws, as SVG.
pub(super) fn picture(height: i32, draw: impl FnOnce(&Canvas<'_>)) -> String {
    let mut svg = String::new();
    {
        let canvas = Canvas(SVGBackend::with_string(&mut svg, (WIDTH as u32, height as u32)).into_drawing_area());
        canvas.rect((0, 0), (WIDTH, height), PAPER);
        draw(&canvas);
        canvas.0.present().expect(IN_MEMORY);
    }
    svg
}

const IN_MEMORY: &str = "a picture in memory can be drawn on";

impl Canvas<'_> {
    fn draw<'e, E>(&self, element: &'e E)
    where
        &'e E: PointCollection<'e, Point>,
        E: for<'b> Drawable<SVGBackend<'b>>,
    {
        self.0.draw(element).expect(IN_MEMORY);
    }

    /// A filled rectangle.
    pub(super) fn rect(&self, from: Point, to: Point, fill: RGBColor) {
        self.draw(&Rectangle::new([from, to], fill.filled()));
    }

    /// The outline of a rectangle.
    pub(super) fn frame(&self, from: Point, to: Point, color: RGBColor) {
        self.draw(&Rectangle::new([from, to], color.stroke_width(1)));
    }

    /// A rectangle of thin lines, for unknown values.
    pub(super) fn hatched(&self, from: Point, to: Point) {
        for y in (from.1..to.1).filter(|y| y % 4 == 0) {
            self.line(&[(from.0, y), (to.0, y)], PALE, 1);
        }
    }

    /// A line through the points.
    pub(super) fn line(&self, points: &[Point], color: RGBColor, width: u32) {
        self.draw(&PathElement::new(points.to_vec(), color.stroke_width(width)));
    }

    /// A dashed line through the points; `drawn` and `not` are the pixels of a dash and of a gap.
    pub(super) fn dashed(&self, points: &[Point], color: RGBColor, (drawn, not): (i32, i32)) {
        let style: ShapeStyle = color.stroke_width(2);
        self.draw(&DashedPathElement::new(points.iter().copied(), drawn, not, style));
    }

    /// A thin dashed line through the points.
    pub(super) fn thin_dashes(&self, points: &[Point], color: RGBColor, (drawn, not): (i32, i32)) {
        let style: ShapeStyle = color.stroke_width(1);
        self.draw(&DashedPathElement::new(points.iter().copied(), drawn, not, style));
    }

    /// Text at a position: the left end, right end or middle, by `align`.
    pub(super) fn text(&self, at: Point, align: HPos, px: i32, text: &str) {
        self.coloured_text(at, align, px, INK, text);
    }

    /// Text in another colour.
    pub(super) fn coloured_text(&self, at: Point, align: HPos, px: i32, color: RGBColor, text: &str) {
        let font = ("sans-serif", f64::from(px) * FONT_SIZE_OF_PLOTTERS).into_font();
        let style = TextStyle::from(font).color(&color).pos(Pos::new(align, VPos::Center));
        self.draw(&Text::new(printable(text), at, style));
    }

    /// The caption at the top. The caller leaves [`caption_height`] pixels for it.
    pub(super) fn caption(&self, caption: &str) {
        for (index, line) in caption_lines(caption).iter().enumerate() {
            let y = MARGIN + CAPTION_PX / 2 + index as i32 * (LINE + 3);
            self.text((MARGIN, y), HPos::Left, CAPTION_PX, line);
        }
    }

    /// A legend from `y` downwards. `sign` draws the sign of each entry into a box of [`SIGN`].
    pub(super) fn legend(&self, y: i32, entries: &[String], sign: impl Fn(usize, Point, Point)) {
        for (index, ((x, row), entry)) in legend_places(entries).into_iter().zip(entries).enumerate() {
            let middle = y + row * LINE + LINE / 2;
            sign(index, (x, middle - SIGN.1 / 2), (x + SIGN.0, middle + SIGN.1 / 2));
            self.text((x + SIGN.0 + 6, middle), HPos::Left, TEXT_PX, entry);
        }
    }

    /// Ticks with their numbers below a field, from left to right.
    pub(super) fn axis_below(&self, scale: &Scale, y: [i32; 2], title: &str) {
        for (value, text) in scale.ticks() {
            let x = scale.at(value);
            self.line(&[(x, y[0]), (x, y[1])], PALE, 1);
            self.text((x, y[1] + 12), HPos::Center, TEXT_PX, &text);
        }
        let middle = i32::midpoint(scale.pixels.0, scale.pixels.1);
        self.coloured_text((middle, y[1] + 12 + LINE), HPos::Center, TEXT_PX, GREY, title);
    }

    /// Ticks to the left of a field, with lines across it.
    pub(super) fn axis_left(&self, scale: &Scale, x: [i32; 2]) {
        for (value, text) in scale.ticks() {
            let y = scale.at(value);
            self.line(&[(x[0], y), (x[1], y)], PALE, 1);
            self.text((x[0] - 8, y), HPos::Right, TEXT_PX, &text);
        }
    }
}

/// Height of the caption, including the top margin.
pub(super) fn caption_height(caption: &str) -> i32 {
    MARGIN + caption_lines(caption).len() as i32 * (LINE + 3) + 6
}

fn caption_lines(caption: &str) -> Vec<String> {
    wrapped(caption, WIDTH - 2 * MARGIN, CAPTION_PX)
}

/// Size of a legend's signs.
pub(super) const SIGN: Point = (26, 12);

/// Height of a legend in pixels.
pub(super) fn legend_height(entries: &[String]) -> i32 {
    legend_places(entries).last().map_or(0, |(_, row)| (row + 1) * LINE + 6)
}

/// Start and row of each entry.
fn legend_places(entries: &[String]) -> Vec<(i32, i32)> {
    let (mut x, mut row) = (MARGIN, 0);
    let mut places = Vec::new();
    for entry in entries {
        let width = SIGN.0 + 6 + text_width(entry, TEXT_PX) + 22;
        if x > MARGIN && x + width > WIDTH - MARGIN {
            (x, row) = (MARGIN, row + 1);
        }
        places.push((x, row));
        x += width;
    }
    places
}

/// Mapping from values to pixels along an axis.
pub(super) struct Scale {
    range: RangedCoordf64,
    pixels: (i32, i32),
}

impl Scale {
    /// A mapping from the values to the pixels. If all values are equal, the axis still gets a length.
    pub(super) fn new(low: f64, high: f64, pixels: (i32, i32)) -> Scale {
        let high = if high > low { high } else { low + 1.0 };
        Scale { range: (low..high).into(), pixels }
    }

    /// Pixel of a value.
    pub(super) fn at(&self, value: f64) -> i32 {
        self.range.map(&value, self.pixels)
    }

    /// Values of the ticks with their names, far enough apart for the text.
    fn ticks(&self) -> Vec<(f64, String)> {
        let is_upwards = self.pixels.1 < self.pixels.0;
        let apart = if is_upwards { 2 * LINE } else { 70 };
        let values = self.range.key_points(((self.pixels.1 - self.pixels.0).abs() / apart).max(2) as usize);
        let (unit, prefix) = prefix(values.iter().fold(0.0, |most: f64, value| most.max(value.abs())));
        let step = values.windows(2).map(|pair| pair[1] - pair[0]).fold(f64::INFINITY, f64::min) / unit;
        let places = if step.is_finite() && step > 0.0 { (-step.log10().floor()).clamp(0.0, 6.0) as usize } else { 0 };
        let name = |value: f64| match value {
            0.0 => "0".to_owned(),
            value => match decimals(value / unit, places) {
                zero if zero.chars().all(|c| c == '0' || c == '.') => "0".to_owned(),
                number => format!("{number}{prefix}"),
            },
        };
        values.into_iter().map(|value| (value, name(value))).collect()
    }
}

/// Unit prefix for the numbers of an axis, by its largest number.
fn prefix(largest: f64) -> (f64, &'static str) {
    match largest {
        largest if largest >= 1e9 => (1e9, " G"),
        largest if largest >= 1e6 => (1e6, " M"),
        largest if largest >= 1e5 => (1e3, " k"),
        _ => (1.0, ""),
    }
}

/// Estimated width of a text; the exact width depends on the viewer.
pub(super) fn text_width(text: &str, px: i32) -> i32 {
    (text.chars().count() as f64 * f64::from(px) * LETTER_WIDTH).ceil() as i32
}

/// A text broken between words into lines of at most this width.
fn wrapped(text: &str, width: i32, px: i32) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if text_width(line, px) + text_width(word, px) < width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// A text that fits a width; a long text loses its middle.
pub(super) fn fitted(text: &str, width: i32, px: i32) -> String {
    let letters = (f64::from(width) / (f64::from(px) * LETTER_WIDTH)) as usize;
    let all: Vec<char> = text.chars().collect();
    if all.len() <= letters {
        return text.to_owned();
    }
    let (head, tail) = (letters.saturating_sub(1).div_ceil(2), letters.saturating_sub(1) / 2);
    all[..head].iter().chain(&['…']).chain(&all[all.len() - tail..]).collect()
}

/// A text without characters that XML forbids (XML 1.0, 2.2).
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_label_keeps_both_its_ends() {
        assert_eq!(fitted("npb.cg, class A, four threads", 80, 13), "npb.…eads");
        assert_eq!(fitted("CG A", 80, 13), "CG A");
    }

    #[test]
    fn no_tick_is_a_negative_zero() {
        // Steps of 0.1 from below zero do not hit it exactly.
        for (low, high) in [(-0.3, 1.0), (-0.1, 0.2), (-0.7, 0.7)] {
            for (_, name) in Scale::new(low, high, (0, 900)).ticks() {
                let digits = name.trim_start_matches('-');
                assert!(digits == name || digits.chars().any(|c| ('1'..='9').contains(&c)), "{low}..{high}: {name}");
            }
        }
    }

    #[test]
    fn neighbouring_ticks_have_different_names() {
        for (low, high) in [(0.98, 1.03), (0.0, 1.0), (0.0, 7e6), (-3.0, 120.0), (0.0, 0.0)] {
            let mut names: Vec<String> =
                Scale::new(low, high, (0, 700)).ticks().into_iter().map(|tick| tick.1).collect();
            let count = names.len();
            names.dedup();
            assert!(count >= 2 && names.len() == count, "{low}..{high}: {names:?}");
        }
    }
}
