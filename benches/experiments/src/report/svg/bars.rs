//! Horizontal bars in groups, with room for names of any length beside them. Each bar has its interval as a whisker
//! and its value as a number.
//!
//! ```text
//!             ■ base  ■ auto
//!   CG A      ▇▇▇▇▇▇▇├──┤ 1.62 (1.58 - 1.66)
//!             ▇▇▇├┤       1.31 (1.30 - 1.32)
//!   IS A      ...
//!             0.9  1.0  1.1 ...
//! ```

use plotters::style::text_anchor::HPos;

use super::canvas::{
    Canvas, LINE, MARGIN, Scale, TEXT_PX, WIDTH, caption_height, fitted, legend_height, picture, text_width,
};
use super::palette::{GREY, INK, PALE, PAPER, fill};
use crate::report::common_sections::number;
use crate::report::{BarGroup, Bars};

const BAR: i32 = 16;
const GAP: i32 = 12;
/// Maximum width for the names of groups, in pixels.
const NAMES_MAX: i32 = 280;
/// Height of the axis with its numbers and its title, in pixels.
const AXIS: i32 = 48;

/// A bar: value, lower end, upper end.
type Bar = (f64, f64, f64);

/// The picture as SVG.
pub(super) fn draw(bars: &Bars) -> String {
    let legend = if bars.series.len() > 1 { &bars.series[..] } else { &[] };
    let top = caption_height(&bars.caption) + legend_height(legend);
    let field = Field::of(bars, top);
    picture(field.bottom() + AXIS + MARGIN / 2, |canvas| {
        canvas.caption(&bars.caption);
        canvas.legend(caption_height(&bars.caption), legend, |index, from, to| {
            canvas.rect(from, to, fill(index, bars.series.len()));
            canvas.frame(from, to, INK);
        });
        canvas.axis_below(&field.scale, [top, field.bottom()], &bars.axis);
        for (index, group) in bars.groups.iter().enumerate() {
            field.draw_group(canvas, group, top + index as i32 * field.group_height());
        }
        if bars.reference.is_some() {
            canvas.line(&[(field.base(), top), (field.base(), field.bottom())], INK, 1);
        }
    })
}

/// Layout of the bars.
struct Field {
    scale: Scale,
    /// Value where bars begin: the reference, so that their length shows the gain or loss; otherwise zero.
    base: f64,
    names: i32,
    series: usize,
    groups: usize,
    top: i32,
}

impl Field {
    fn of(bars: &Bars, top: i32) -> Field {
        let base = bars.reference.unwrap_or(0.0);
        let known: Vec<Bar> = bars.groups.iter().flat_map(|group| &group.bars).filter_map(finite).collect();
        let ends = || known.iter().flat_map(|bar| [bar.0, bar.1, bar.2]).chain([base]);
        let (low, high) = (ends().fold(base, f64::min), ends().fold(base, f64::max));
        let room = (high - low) * 0.04;
        let low = if low < base { low - room } else { low };
        let widest = bars.groups.iter().map(|group| text_width(&group.name, TEXT_PX)).max().unwrap_or(0);
        let names = MARGIN + widest.min(NAMES_MAX) + 12;
        let values = known.iter().map(|bar| text_width(&value_text(*bar), TEXT_PX)).max().unwrap_or(0);
        let right = WIDTH - MARGIN - values - 8;
        let series = bars.series.len().max(1);
        Field {
            scale: Scale::new(low, high + room, (names, right)),
            base,
            names,
            series,
            groups: bars.groups.len(),
            top,
        }
    }

    fn group_height(&self) -> i32 {
        self.series as i32 * BAR + GAP
    }

    fn bottom(&self) -> i32 {
        self.top + self.groups as i32 * self.group_height()
    }

    fn base(&self) -> i32 {
        self.scale.at(self.base)
    }

    fn draw_group(&self, canvas: &Canvas<'_>, group: &BarGroup, y: i32) {
        if y > self.top {
            canvas.line(&[(MARGIN, y), (WIDTH - MARGIN, y)], PALE, 1);
        }
        let name = fitted(&group.name, NAMES_MAX, TEXT_PX);
        canvas.text((self.names - 10, y + self.group_height() / 2), HPos::Right, TEXT_PX, &name);
        for (index, bar) in group.bars.iter().enumerate() {
            let y = y + GAP / 2 + index as i32 * BAR;
            match finite(bar) {
                Some(bar) => self.draw_bar(canvas, bar, index, y),
                None => canvas.coloured_text((self.base() + 6, y + BAR / 2), HPos::Left, TEXT_PX - 1, GREY, "absent"),
            }
        }
    }

    fn draw_bar(&self, canvas: &Canvas<'_>, bar: Bar, index: usize, y: i32) {
        let (value, low, high) = bar;
        let [x, x_low, x_high] = [value, low, high].map(|value| self.scale.at(value));
        let (from, to) = ((x.min(self.base()), y + 1), (x.max(self.base()), y + BAR - 1));
        canvas.rect(from, to, fill(index, self.series));
        canvas.frame(from, to, INK);
        if x_high > x_low {
            // A white border makes the whisker visible on dark bars.
            let middle = y + BAR / 2;
            canvas.line(&[(x_low, middle), (x_high, middle)], PAPER, 5);
            canvas.line(&[(x_low, middle), (x_high, middle)], INK, 2);
            for x in [x_low, x_high] {
                canvas.line(&[(x, y + 3), (x, y + BAR - 3)], INK, 2);
            }
        }
        let beside = x_high.max(to.0) + 7;
        canvas.text((beside, y + BAR / 2), HPos::Left, TEXT_PX - 1, &value_text(bar));
    }
}

fn value_text((value, low, high): Bar) -> String {
    if low == high { number(value) } else { format!("{} ({} - {})", number(value), number(low), number(high)) }
}

fn finite(bar: &Option<Bar>) -> Option<Bar> {
    bar.filter(|(value, low, high)| [value, low, high].iter().all(|value| value.is_finite()))
}

// A line of text fits a bar.
const _: () = assert!(TEXT_PX < BAR && BAR <= LINE);
