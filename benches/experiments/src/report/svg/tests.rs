//! Pictures as documents of XML: each is read back, and its texts, lengths and lines are compared with its data. No
//! file is written.

use quick_xml::Reader;
use quick_xml::events::Event;

use super::svg;
use crate::report::{BarGroup, Bars, Lines, MapPlot, Plot, Report, fixture};
use crate::results::{MapColumn, MemoryMap};

/// Texts of a document. The reader checks that it is well-formed to its end: every tag is closed by its own.
fn texts(svg: &str) -> Vec<String> {
    let mut reader = Reader::from_str(svg);
    let (mut texts, mut depth, mut text) = (Vec::new(), 0_i32, String::new());
    loop {
        match reader.read_event().unwrap_or_else(|error| panic!("{error} in {svg}")) {
            Event::Start(_) => (depth, text) = (depth + 1, String::new()),
            Event::Text(part) => text += &part,
            Event::GeneralRef(name) => text += &format!("&{};", &*name),
            Event::End(tag) => {
                depth -= 1;
                if tag.name().as_ref() == "text" {
                    texts.push(text.trim().to_owned());
                }
            }
            Event::Eof => break,
            _ => {}
        }
    }
    assert_eq!(depth, 0, "{svg}");
    texts
}

fn bars(groups: Vec<BarGroup>) -> Bars {
    let series = vec!["auto".into(), "ingens".into()];
    Bars { caption: "Ratios".into(), reference: Some(1.0), series, groups, ..Bars::default() }
}

#[test]
fn every_picture_of_a_report_is_well_formed_and_contains_its_caption() {
    let report = Report::of(&fixture::results());
    let pictures = report.pictures();
    let kinds = |is: fn(&Plot) -> bool| pictures.iter().filter(|(_, plot)| is(plot)).count();
    assert_eq!(kinds(|plot| matches!(plot, Plot::Bars(_))), 2, "ratios and actions");
    assert_eq!(kinds(|plot| matches!(plot, Plot::Lines(_))), 4, "coverage and speed of two cases");
    assert_eq!(kinds(|plot| matches!(plot, Plot::Map(_))), 2);
    for (_, plot) in pictures {
        let texts = texts(&svg(plot)).join(" ");
        let caption = plot.caption().replace('<', "&lt;").replace('>', "&gt;").replace('\'', "&apos;");
        assert!(texts.contains(&caption), "{caption} in {texts}");
    }
}

#[test]
fn special_characters_of_xml_are_only_text() {
    let name = "<b>&\"'\u{1}</b>".to_owned();
    let group = BarGroup { name, bars: vec![Some((2.0, 1.5, 2.5)), None] };
    let texts = texts(&svg(&Plot::Bars(bars(vec![group]))));
    assert!(texts.iter().any(|text| text == "&lt;b&gt;&amp;&quot;&apos; &lt;/b&gt;"), "{texts:?}");
    assert!(texts.iter().any(|text| text == "absent") && texts.iter().any(|text| text == "2.000 (1.500 - 2.500)"));
}

#[test]
fn the_length_of_a_bar_is_proportional_to_its_gain() {
    let group = |value: f64| BarGroup { name: format!("{value}"), bars: vec![Some((value, value, value))] };
    let mut picture = bars(vec![group(1.5), group(2.0), group(0.5)]);
    picture.series.truncate(1);
    let svg = svg(&Plot::Bars(picture));
    let fill = "fill=\"#0072B2\"";
    let width = |line: &str| -> f64 {
        let text = line.split("width=\"").nth(1).and_then(|rest| rest.split('"').next());
        text.and_then(|text| text.parse().ok()).expect("a width")
    };
    let widths: Vec<f64> = svg.lines().filter(|line| line.contains(fill)).map(width).collect();
    let [gain, twice, loss] = widths[..] else { panic!("three bars: {svg}") };
    assert!((twice / gain - 2.0).abs() < 0.02 && (loss / gain - 1.0).abs() < 0.02, "{widths:?}");
}

#[test]
fn lines_differ_in_more_than_colour_and_are_named_at_their_ends() {
    let line = |name: &str, to: f64| (name.to_owned(), vec![(0.0, 0.0), (1.0, to), (2.0, to)]);
    let lines = vec![line("base", 0.0), line("auto", 97.0), line("greedy", 97.5)];
    let plot = Lines { caption: "Coverage".into(), y_max: Some(100.0), lines, ..Lines::default() };
    let svg = svg(&Plot::Lines(plot));
    let texts = texts(&svg);
    assert!(["base", "auto", "greedy"].iter().all(|name| texts.iter().any(|text| text == name)), "{texts:?}");
    // A solid line is one polyline, a dashed one is many.
    let pieces = |color: &str| svg.lines().filter(|line| line.contains("<polyline") && line.contains(color)).count();
    let [solid, dashed] = ["stroke=\"#000000\"", "stroke=\"#D55E00\""].map(pieces);
    assert!(solid <= 3 && dashed > 10, "{solid} {dashed}");
}

#[test]
fn pictures_of_no_data_and_of_invalid_numbers_are_still_pictures() {
    let one = MapColumn { backing: "42".into(), heat: "  ".into(), ..MapColumn::default() };
    let nan = BarGroup { name: "x".into(), bars: vec![Some((f64::NAN, 0.0, 0.0)), None] };
    let plots = [
        Plot::Bars(Bars::default()),
        Plot::Bars(bars(vec![nan])),
        Plot::Lines(Lines::default()),
        Plot::Lines(Lines {
            lines: vec![("x".into(), vec![(f64::NAN, 1.0), (1.0, f64::INFINITY)])],
            ..Lines::default()
        }),
        Plot::Map(MapPlot::default()),
        Plot::Map(MapPlot { map: MemoryMap { first_window: 0, columns: vec![one] }, ..MapPlot::default() }),
    ];
    for plot in plots {
        let svg = svg(&plot);
        texts(&svg);
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }
}

#[test]
fn a_map_shows_kvms_counts_beside_the_inferred_mappings() {
    let report = Report::of(&fixture::results());
    let map = report.pictures().into_iter().find(|(name, _)| name.contains("map-CG")).expect("auto has a map");
    let texts = texts(&svg(map.1)).join("|");
    // 192 of 256 windows are large, the first 32 of them under the guest's 4 KiB tables; KVM counts two fewer.
    assert!(texts.contains("(at the end 192 in 2 MiB; KVM counts 190)"), "{texts}");
    assert!(texts.contains("|4 KiB|") && texts.contains("|not known|"), "{texts}");
    // The last 32 windows are never backed: the picture ends before them, and says so.
    assert!(texts.contains("MiB, 448 of 512 (rest never backed)") && !texts.contains("|nothing|"), "{texts}");
}
