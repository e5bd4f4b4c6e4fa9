//! Groups of small boxes in rows and columns: each box has a text, and a shade for a share.
//!
//! ```text
//!                   machine A       machine B
//!                  4k  2m  1g      4k  2m  1g
//!   GUPS 1 GiB  4k ▫   ▫   ▪       ▫   ▪   ▪
//!               2m ▫   ▪   ▪       …
//!               1g …
//! ```

use plotters::style::text_anchor::HPos;

use super::canvas::{Canvas, LINE, MARGIN, TEXT_PX, WIDTH, caption_height, fitted, legend_height, picture};
use super::palette::{GREY, INK, PALE, heat};
use crate::report::{BoxOf, Boxes};

/// Size of a box; a line of text fits.
const HEIGHT: i32 = 18;
const GROUP_GAP: i32 = 12;
/// Width for the names of rows.
const NAMES: i32 = 104;
/// Width for the names of the boxes of a group.
const INNER_NAMES: i32 = 26;
/// Heat of a share of one. The text of a box is dark, so the darkest colours are not used.
const HEAT_MAX: f64 = 4.0;
/// Pixels of a dash and of a gap in the frame of simulated numbers.
const DASH: (i32, i32) = (8, 5);
/// Sign before each simulated number.
const SIMULATED_SIGN: &str = "~";

/// The picture as SVG.
pub(super) fn draw(boxes: &Boxes) -> String {
    let legend: Vec<String> = boxes.legend.iter().map(|(text, _)| text.clone()).chain(sign_of(boxes)).collect();
    let legend_top = caption_height(&boxes.caption);
    let top = legend_top + legend_height(&legend) + 2 * LINE + 4;
    let field = Field::of(boxes, top);
    picture(field.bottom() + MARGIN, |canvas| {
        canvas.caption(&boxes.caption);
        canvas.legend(legend_top, &legend, |index, from, to| match boxes.legend.get(index) {
            Some((_, share)) => {
                canvas.rect(from, to, shade(*share));
                canvas.frame(from, to, INK);
            }
            None => frame(canvas, boxes, from, to),
        });
        for (number, name) in boxes.columns.iter().enumerate() {
            field.draw_heading(canvas, boxes, number, name);
        }
        for (row, (name, groups)) in boxes.rows.iter().enumerate() {
            field.draw_row(canvas, boxes, row, name, groups);
        }
    })
}

/// Entry of the legend for the frame of simulated numbers.
fn sign_of(boxes: &Boxes) -> Option<String> {
    boxes.is_simulated.then(|| format!("dashed frame and {SIMULATED_SIGN}: simulated, not measured"))
}

fn shade(share: f64) -> plotters::style::RGBColor {
    heat((share.clamp(0.0, 1.0) * HEAT_MAX).round() as u8)
}

fn frame(canvas: &Canvas<'_>, boxes: &Boxes, from: (i32, i32), to: (i32, i32)) {
    if boxes.is_simulated {
        let corners = [from, (to.0, from.1), to, (from.0, to.1), from];
        canvas.thin_dashes(&corners, INK, DASH);
    } else {
        canvas.frame(from, to, INK);
    }
}

/// Layout of the boxes.
struct Field {
    top: i32,
    rows: i32,
    inner: i32,
    box_width: i32,
    group_width: i32,
}

impl Field {
    fn of(boxes: &Boxes, top: i32) -> Field {
        let (columns, inner) = (boxes.columns.len().max(1) as i32, boxes.inner.len().max(1) as i32);
        let group_width = (WIDTH - 2 * MARGIN - NAMES - INNER_NAMES) / columns;
        let box_width = (group_width - GROUP_GAP) / inner;
        Field { top, rows: boxes.rows.len() as i32, inner, box_width, group_width }
    }

    fn row_height(&self) -> i32 {
        self.inner * HEIGHT + GROUP_GAP
    }

    fn bottom(&self) -> i32 {
        self.top + self.rows * self.row_height()
    }

    fn left(&self, column: usize) -> i32 {
        MARGIN + NAMES + INNER_NAMES + column as i32 * self.group_width
    }

    fn draw_heading(&self, canvas: &Canvas<'_>, boxes: &Boxes, column: usize, name: &str) {
        let left = self.left(column);
        let width = self.box_width * self.inner;
        let name = fitted(name, self.group_width, TEXT_PX);
        canvas.text((left + width / 2, self.top - LINE - LINE / 2 - 2), HPos::Center, TEXT_PX, &name);
        for (index, inner) in boxes.inner.iter().enumerate() {
            let x = left + index as i32 * self.box_width + self.box_width / 2;
            canvas.coloured_text((x, self.top - LINE / 2), HPos::Center, TEXT_PX, GREY, inner);
        }
    }

    fn draw_row(&self, canvas: &Canvas<'_>, boxes: &Boxes, row: usize, name: &str, groups: &[Vec<Option<BoxOf>>]) {
        let y = self.top + row as i32 * self.row_height();
        canvas.line(&[(MARGIN, y - GROUP_GAP / 2), (WIDTH - MARGIN, y - GROUP_GAP / 2)], PALE, 1);
        let name = fitted(name, NAMES, TEXT_PX);
        canvas.text((MARGIN, y + self.inner * HEIGHT / 2), HPos::Left, TEXT_PX, &name);
        for (index, inner) in boxes.inner.iter().enumerate() {
            let at = (MARGIN + NAMES + INNER_NAMES - 8, y + index as i32 * HEIGHT + HEIGHT / 2);
            canvas.coloured_text(at, HPos::Right, TEXT_PX, GREY, inner);
        }
        for (column, group) in groups.iter().enumerate() {
            let left = self.left(column);
            frame(canvas, boxes, (left - 1, y - 1), (left + self.inner * self.box_width, y + self.inner * HEIGHT));
            for (index, one) in group.iter().enumerate() {
                let (line, place) = (index as i32 / self.inner, index as i32 % self.inner);
                let from = (left + place * self.box_width + 1, y + line * HEIGHT + 1);
                self.draw_box(canvas, boxes, from, one.as_ref());
            }
        }
    }

    fn draw_box(&self, canvas: &Canvas<'_>, boxes: &Boxes, from: (i32, i32), one: Option<&BoxOf>) {
        let to = (from.0 + self.box_width - 3, from.1 + HEIGHT - 3);
        let middle = (i32::midpoint(from.0, to.0), i32::midpoint(from.1, to.1));
        let Some(one) = one else {
            return canvas.coloured_text(middle, HPos::Center, TEXT_PX - 1, GREY, "absent");
        };
        canvas.rect(from, to, shade(one.shade));
        let sign = if boxes.is_simulated { SIMULATED_SIGN } else { "" };
        canvas.text(middle, HPos::Center, TEXT_PX - 1, &format!("{sign}{}", one.text));
    }
}

// A line of text fits a box.
const _: () = assert!(TEXT_PX < HEIGHT && HEIGHT <= LINE);
