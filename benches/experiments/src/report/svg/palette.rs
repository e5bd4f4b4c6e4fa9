//! Colours that colour-blind readers can distinguish, ordered from dark to light so that grey print distinguishes
//! them too: Okabe and Ito, "Color Universal Design" (2008), without their black for filled areas.

use plotters::style::RGBColor;

pub(super) const INK: RGBColor = RGBColor(32, 32, 32);
pub(super) const GREY: RGBColor = RGBColor(110, 110, 110);
pub(super) const PALE: RGBColor = RGBColor(222, 222, 222);
pub(super) const PAPER: RGBColor = RGBColor(255, 255, 255);

pub(super) const BLACK: RGBColor = RGBColor(0, 0, 0);
pub(super) const BLUE: RGBColor = RGBColor(0, 114, 178);
pub(super) const VERMILLION: RGBColor = RGBColor(213, 94, 0);
pub(super) const GREEN: RGBColor = RGBColor(0, 158, 115);
pub(super) const PURPLE: RGBColor = RGBColor(204, 121, 167);
pub(super) const SKY: RGBColor = RGBColor(86, 180, 233);
pub(super) const ORANGE: RGBColor = RGBColor(230, 159, 0);
pub(super) const YELLOW: RGBColor = RGBColor(240, 228, 66);

/// Colours for filled areas; yellow is last and gets an outline.
const FILLS: [RGBColor; 7] = [BLUE, VERMILLION, GREEN, PURPLE, SKY, ORANGE, YELLOW];
/// Colours for thin lines on white, without yellow, which is invisible there.
const STROKES: [RGBColor; 7] = [BLACK, BLUE, VERMILLION, GREEN, PURPLE, SKY, ORANGE];

/// Fill of one of `count` series. Colours are as different as the palette allows; the palest are used only if needed.
pub(super) fn fill(index: usize, count: usize) -> RGBColor {
    spread(&FILLS[..count.clamp(6, FILLS.len())], index, count)
}

/// Line colour of one of `count` series.
pub(super) fn stroke(index: usize, count: usize) -> RGBColor {
    spread(&STROKES[..count.clamp(5, STROKES.len())], index, count)
}

fn spread(colors: &[RGBColor], index: usize, count: usize) -> RGBColor {
    let last = colors.len() - 1;
    match count {
        0 | 1 => colors[0],
        count if count <= colors.len() => colors[(index * last + (count - 1) / 2) / (count - 1)],
        _ => colors[index % colors.len()],
    }
}

/// Colour of a heat, from 0 (cold, light) to 9 (hot, dark). There is one hue, so only darkness matters.
pub(super) fn heat(level: u8) -> RGBColor {
    const COLD: (f64, f64, f64) = (255.0, 247.0, 222.0);
    const HOT: (f64, f64, f64) = (92.0, 24.0, 0.0);
    let part = f64::from(level.min(9)) / 9.0;
    let mix = |cold: f64, hot: f64| (cold + (hot - cold) * part).round() as u8;
    RGBColor(mix(COLD.0, HOT.0), mix(COLD.1, HOT.1), mix(COLD.2, HOT.2))
}

/// Lightness from 0 to 1: relative luminance (WCAG 2.1, "relative luminance").
#[cfg(test)]
pub(super) fn luminance(RGBColor(red, green, blue): RGBColor) -> f64 {
    let linear = |value: u8| {
        let value = f64::from(value) / 255.0;
        if value <= 0.040_45 { value / 12.92 } else { ((value + 0.055) / 1.055).powf(2.4) }
    };
    0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_palette_gets_lighter_from_one_colour_to_the_next() {
        for colors in [FILLS, STROKES] {
            assert!(colors.is_sorted_by(|a, b| luminance(*a) < luminance(*b)), "{colors:?}");
        }
        let heats: Vec<RGBColor> = (0..10).map(heat).collect();
        assert!(heats.is_sorted_by(|cold, hot| luminance(*cold) > luminance(*hot) + 0.02), "{heats:?}");
    }

    #[test]
    fn each_series_has_its_own_colour_up_to_the_size_of_the_palette() {
        for count in 1..=FILLS.len() {
            let mut colors: Vec<RGBColor> = (0..count).map(|index| fill(index, count)).collect();
            colors.dedup();
            assert_eq!(colors.len(), count);
        }
        assert_eq!([fill(0, 2), fill(1, 2)], [BLUE, ORANGE]);
    }
}
