//! Lines over time. Each line has a colour, dashes, a marker, and its name at its end, so that the
//! reader needs no legend.

use plotters::style::text_anchor::HPos;

use super::canvas::{Canvas, LINE, MARGIN, Point, Scale, TEXT_PX, WIDTH, caption_height, fitted, picture, text_width};
use super::palette::{GREY, INK, PALE, PAPER, stroke};
use crate::report::Lines;

const HEIGHT: i32 = 300;
/// Width for the numbers on the left, in pixels.
const NUMBERS: i32 = 74;
/// Maximum width for names at the ends of lines, in pixels.
const NAMES_MAX: i32 = 200;
const AXIS: i32 = 48;
/// Maximum number of points per line. More points would not be visible.
const POINTS_MAX: usize = 400;
/// Approximate number of markers per line.
const MARKERS: usize = 9;
/// Lengths of dash and gap in pixels; the first line is solid.
const DASHES: [Option<(i32, i32)>; 4] = [None, Some((9, 5)), Some((2, 4)), Some((18, 5))];

/// A line with a name and points in pixels.
struct Drawn<'a> {
    name: &'a str,
    points: Vec<Point>,
}

/// The picture as SVG.
pub(super) fn draw(lines: &Lines) -> String {
    let top = caption_height(&lines.caption) + LINE + 8;
    let names = lines.lines.iter().map(|(name, _)| text_width(name, TEXT_PX)).max().unwrap_or(0).min(NAMES_MAX);
    let right = WIDTH - MARGIN - names - 30;
    let (x, y) = scales(lines, (MARGIN + NUMBERS, right), (top + HEIGHT, top));
    let drawn: Vec<Drawn<'_>> = lines.lines.iter().map(|(name, points)| in_pixels(name, points, &x, &y)).collect();
    let drawn: Vec<Drawn<'_>> = drawn.into_iter().filter(|line| !line.points.is_empty()).collect();
    picture(top + HEIGHT + AXIS + MARGIN / 2, |canvas| {
        canvas.caption(&lines.caption);
        canvas.coloured_text((MARGIN, top - LINE / 2 - 8), HPos::Left, TEXT_PX, GREY, &lines.y_axis);
        canvas.axis_left(&y, [MARGIN + NUMBERS, right]);
        canvas.axis_below(&x, [top + HEIGHT, top + HEIGHT + 4], &lines.x_axis);
        canvas.frame((MARGIN + NUMBERS, top), (right, top + HEIGHT), GREY);
        for (index, line) in drawn.iter().enumerate() {
            draw_line(canvas, line, index, drawn.len());
        }
        draw_names(canvas, &drawn, right, (top, top + HEIGHT));
        if drawn.is_empty() {
            canvas.coloured_text((WIDTH / 2, top + HEIGHT / 2), HPos::Center, TEXT_PX, GREY, "nothing was measured");
        }
    })
}

fn scales(lines: &Lines, x_pixels: Point, y_pixels: Point) -> (Scale, Scale) {
    let points = || lines.lines.iter().flat_map(|(_, points)| points).filter(|point| is_finite(point));
    let end = |of: fn(&(f64, f64)) -> f64, pick: fn(f64, f64) -> f64| points().map(of).fold(0.0, pick);
    // Room above keeps lines off the frame.
    let y_high = lines.y_max.unwrap_or_else(|| end(|point| point.1, f64::max)) * 1.05;
    let x = Scale::new(end(|point| point.0, f64::min), end(|point| point.0, f64::max), x_pixels);
    (x, Scale::new(end(|point| point.1, f64::min), y_high, y_pixels))
}

fn is_finite(point: &(f64, f64)) -> bool {
    point.0.is_finite() && point.1.is_finite()
}

fn in_pixels<'a>(name: &'a str, points: &[(f64, f64)], x: &Scale, y: &Scale) -> Drawn<'a> {
    let known: Vec<&(f64, f64)> = points.iter().filter(|point| is_finite(point)).collect();
    let step = known.len().div_ceil(POINTS_MAX).max(1);
    // The last point is always kept.
    let mut kept: Vec<Point> = known.iter().rev().step_by(step).map(|point| (x.at(point.0), y.at(point.1))).collect();
    kept.reverse();
    Drawn { name, points: kept }
}

fn draw_line(canvas: &Canvas<'_>, line: &Drawn<'_>, index: usize, count: usize) {
    let color = stroke(index, count);
    match DASHES[index % DASHES.len()] {
        None => canvas.line(&line.points, color, 2),
        Some(dashes) => canvas.dashed(&line.points, color, dashes),
    }
    // Each line has its markers at other points, so that overlapping lines show both.
    let step = line.points.len().div_ceil(MARKERS).max(1);
    for at in line.points.iter().skip(index * step / count.max(1)).step_by(step).chain(line.points.last()) {
        marker(canvas, *at, index, count);
    }
}

/// A square, a hollow square, a triangle, a cross, a diamond.
fn marker(canvas: &Canvas<'_>, (x, y): Point, index: usize, count: usize) {
    const R: i32 = 4;
    let color = stroke(index, count);
    match index % 5 {
        0 => canvas.rect((x - R, y - R), (x + R, y + R), color),
        1 => {
            canvas.rect((x - R, y - R), (x + R, y + R), PAPER);
            canvas.frame((x - R, y - R), (x + R, y + R), color);
        }
        2 => canvas.line(&[(x - R, y + R), (x, y - R), (x + R, y + R), (x - R, y + R)], color, 2),
        3 => {
            canvas.line(&[(x - R, y - R), (x + R, y + R)], color, 2);
            canvas.line(&[(x - R, y + R), (x + R, y - R)], color, 2);
        }
        _ => canvas.line(&[(x - R, y), (x, y - R), (x + R, y), (x, y + R), (x - R, y)], color, 2),
    }
}

/// Names at the ends of their lines, moved apart if the ends are close, each with its marker.
fn draw_names(canvas: &Canvas<'_>, drawn: &[Drawn<'_>], right: i32, (top, bottom): (i32, i32)) {
    let ends: Vec<Point> = drawn.iter().filter_map(|line| line.points.last().copied()).collect();
    let heights = apart(&ends.iter().map(|end| end.1).collect::<Vec<_>>(), top, bottom);
    for (index, ((line, end), y)) in drawn.iter().zip(&ends).zip(heights).enumerate() {
        // The connecting line is pale, because it is not part of the data.
        canvas.line(&[(end.0 + 6, end.1), (right.max(end.0) + 4, y), (right + 10, y)], PALE, 1);
        marker(canvas, (right + 16, y), index, drawn.len());
        canvas.coloured_text((right + 25, y), HPos::Left, TEXT_PX, INK, &fitted(line.name, NAMES_MAX, TEXT_PX));
    }
}

/// Heights that leave one line of text each and stay as near as possible to the wanted ones, in the same order.
fn apart(wanted: &[i32], top: i32, bottom: i32) -> Vec<i32> {
    let mut order: Vec<usize> = (0..wanted.len()).collect();
    order.sort_by_key(|index| wanted[*index]);
    let mut heights = wanted.to_vec();
    let mut free = top;
    for index in &order {
        heights[*index] = wanted[*index].max(free);
        free = heights[*index] + LINE - 2;
    }
    let mut free = bottom;
    for index in order.iter().rev() {
        heights[*index] = heights[*index].min(free);
        free = heights[*index] - LINE + 2;
    }
    heights
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_lines_that_end_together_are_a_line_of_text_apart() {
        let heights = apart(&[100, 101, 99, 20], 0, 300);
        assert_eq!(heights, [116, 133, 99, 20], "in the order of their ends");
        assert_eq!(apart(&[300, 300], 0, 300), [283, 300], "no name is below the bottom");
    }
}
