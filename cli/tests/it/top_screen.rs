//! The screen of `wideleaf top`, character by character, and the effect of its keys.

use crate::host;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::style::{Color, Modifier};
use wideleaf::top::draw::draw;
use wideleaf::top::screen::{Effect, Overlay, Screen, Tab};
use wideleaf::top::watch::{Detail, Sampled, WatchRequest};
use wideleaf::vm_source::HostReport;
use wideleaf::vm_source::processes::WithoutDaemon;
use wideleaf_control::map::MapReason;
use wideleaf_control::view::{VmView, WindowMap, WindowRange};
use wideleaf_run::failure::Failure;

fn seen(windows: WindowMap) -> Sampled {
    let report =
        HostReport { source: "wideleafd".into(), daemon: Some(host::daemon()), vms: host::vms(), notes: Vec::new() };
    let detail = Detail { pid: host::web().pid, windows: Ok(windows), explanation: Ok(host::explanation()) };
    Sampled { host: Ok(report), detail: Some(detail), message: None }
}

fn failed(text: &str) -> Sampled {
    Sampled { host: Err(Failure::Host(text.into())), detail: None, message: None }
}

fn screen() -> Screen {
    let mut screen = Screen::new(None);
    assert_eq!(screen.take(seen(host::windows())), Effect::None, "the first VM was looked at");
    screen
}

fn press(screen: &mut Screen, code: KeyCode) -> Effect {
    screen.on_key(KeyEvent::new(code, KeyModifiers::NONE))
}

fn drawn(screen: &Screen, width: u16, height: u16) -> Terminal<TestBackend> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(screen, frame.area(), frame.buffer_mut())).unwrap();
    terminal
}

fn rows(screen: &Screen, width: u16, height: u16) -> Vec<String> {
    let terminal = drawn(screen, width, height);
    let symbols: Vec<&str> = terminal.backend().buffer().content().iter().map(|cell| cell.symbol()).collect();
    symbols.chunks(usize::from(width)).map(|row| row.concat().trim_end().to_owned()).collect()
}

/// Rows of the screen that are not empty.
fn lines(screen: &Screen, width: u16, height: u16) -> Vec<String> {
    rows(screen, width, height).into_iter().filter(|row| !row.is_empty()).collect()
}

const KEYS: &str = "? help  q quit  ↑↓ VM  Tab list/map/explain  m column  p policy  o off";

#[test]
fn the_list_has_a_bar_a_share_and_the_last_action() {
    let expected = [
        "wideleaf top: 3 VMs, 3 GiB free, wideleafd 0.1.0",
        "VM                 care                 RAM  resident 4k and 2m+     on 2m+",
        "web                coverage         256 MiB   192 MiB ██████▒▒▒···  66.7 %!",
        "mail               unmanaged        512 MiB   512 MiB ▒▒▒▒▒▒▒▒▒▒▒▒   0.0 %",
        "gups               giant, left al     4 GiB     2 GiB ██████······ 100.0 %",
        "01:01:01 0x000200000 collapse done",
        KEYS,
    ];
    assert_eq!(lines(&screen(), 80, 24), expected);
}

#[test]
fn a_wide_terminal_has_the_full_care_column_and_its_cost() {
    let rows = rows(&screen(), 110, 24);
    let header =
        "VM                 care                                 RAM  resident 4k and 2m+     on 2m+    CPU s  actions";
    assert_eq!(rows[1], header);
    assert!(
        rows[2].starts_with("web                coverage ") && rows[2].ends_with("66.7 %!      0.0       12"),
        "{}",
        rows[2]
    );
    assert!(rows[4].contains("giant, left alone: "), "{}", rows[4]);
}

#[test]
fn a_narrow_terminal_keeps_the_name_the_bar_and_the_share() {
    let expected = [
        "wideleaf top: 3 VMs, 3 GiB free, wideleaf",
        "VM                 4k and 2m+     on 2m+",
        "web                ██████▒▒▒···  66.7 %!",
        "mail               ▒▒▒▒▒▒▒▒▒▒▒▒   0.0 %",
        "gups               ██████······ 100.0 %",
        "01:01:01 0x000200000 collapse done",
        "? help  q quit  ↑↓ VM  Tab list/map/expl",
    ];
    let expected = expected.map(|line| line.chars().take(40).collect::<String>());
    assert_eq!(lines(&screen(), 40, 10), expected);
}

#[test]
fn a_list_longer_than_the_screen_moves_with_the_chosen_vm() {
    let mut screen = screen();
    // Rows: title, header, one row for the list, message, keys.
    assert!(rows(&screen, 80, 5)[2].starts_with("web"));
    press(&mut screen, KeyCode::Down);
    assert!(rows(&screen, 80, 5)[2].starts_with("mail"));
}

#[test]
fn the_map_has_a_letter_and_a_heat_for_each_window() {
    let mut screen = screen();
    press(&mut screen, KeyCode::Tab);
    let row = |address: &str, cells: [&str; 2], times: [usize; 2]| {
        format!("{address} {}{}", cells[0].repeat(times[0]), cells[1].repeat(times[1]))
    };
    let expected = [
        "wideleaf top: 3 VMs, 3 GiB free, wideleafd 0.1.0".to_owned(),
        "web: 132 windows of 2 MiB, 68 in large pages (51.5 %), scanned 72 s ago; the gue".into(),
        row("0x000000000", ["s9", "29"], [4, 28]),
        row("0x004000000", ["25", ""], [32, 0]),
        row("0x008000000", ["40", ""], [32, 0]),
        row("0x00c000000", [".?", ""], [32, 0]),
        row("0x100000000", ["1?", ""], [4, 0]),
        ".=nothing  4=4 KiB  s=large, mapped in 4 KiB  2=2 MiB  1=1 GiB  0-9=heat  a".into(),
        "cell=2 MiB".into(),
        KEYS.into(),
    ];
    assert_eq!(lines(&screen, 80, 24), expected);
}

#[test]
fn a_small_screen_has_several_windows_in_a_cell() {
    let mut screen = screen();
    press(&mut screen, KeyCode::Tab);
    let rows = rows(&screen, 40, 10);
    let expected = ["0x000000000 +929292925252525", "0x008000000 40404040.?.?.?.?", "0x100000000 1?"];
    assert_eq!(rows[2..5], expected);
    assert!(rows.join(" ").contains("a cell=16 MiB"), "{rows:?}");
}

/// The map with all columns, and a note for each that is unknown.
fn with_all_columns() -> WindowMap {
    let range = WindowRange {
        backing: "2244".into(),
        second_level: "????".into(),
        heat: "9???".into(),
        heat_age: "c?3".into(),
        guest: "h2b2".into(),
        state: "l2rw".into(),
        until: "-3g".into(),
        why: "-2BA".into(),
        ..WindowRange::default()
    };
    let reason = |name: &str| MapReason { name: name.into(), text: String::new() };
    let reasons = vec![reason("backing_off_busy"), reason("not_chosen")];
    let notes = vec!["heat: some are not sampled".into(), "second level: it needs root".into()];
    WindowMap { name: "web".into(), ranges: vec![range], reasons, notes, ..WindowMap::default() }
}

#[test]
fn a_key_steps_through_the_columns_of_the_map_and_each_has_its_legend_and_its_note() {
    let mut screen = Screen::new(Some(host::web().pid));
    screen.take(seen(with_all_columns()));
    for (title, cells, legend) in [
        ("web:", "292?4?4?", "4=4 KiB"),
        ("state of web:", "l9l?r?w?", "w=waiting"),
        ("reason why not large of web:", "-9-?B?A?", "A=backing_off_busy"),
        ("tried again within of web:", "-9-?-?g?", "g=up to 64 s"),
        ("KVM's mapping of web:", "?9??????", "?=unknown"),
        ("guest's own pages of web:", "h9h?b?b?", "b=4 KiB"),
        ("heat of web:", "9???", "9=90 % of samples"),
        ("age of the heat of web:", "c???", "c=up to 4 s"),
        ("web:", "292?4?4?", "4=4 KiB"),
    ] {
        let lines = lines(&screen, 80, 24);
        assert!(lines[1].starts_with(title), "{title}: {lines:?}");
        assert_eq!(lines[2], format!("0x000000000 {cells}"), "{title}");
        assert!(lines[3].contains(legend), "{title}: {lines:?}");
        assert_eq!(lines.iter().filter(|line| line.contains(": it needs root")).count(), 1);
        press(&mut screen, KeyCode::Char('m'));
    }
}

#[test]
fn a_host_with_several_nodes_has_one_more_column() {
    let mut screen = Screen::new(Some(host::web().pid));
    let mut map = with_all_columns();
    (map.ranges[0].node, map.nodes) = ("a2B-".into(), vec![0, 3]);
    screen.take(seen(map));
    (0..8).for_each(|_| drop(press(&mut screen, KeyCode::Char('m'))));
    let lines = lines(&screen, 80, 24);
    assert!(lines[1].starts_with("NUMA node of web:"), "{lines:?}");
    assert_eq!(lines[2], "0x000000000 a9a?B?-?");
    assert!(lines[3].contains("B=node 3 mostly") && lines[3].contains("a=node 0"), "{lines:?}");
}

#[test]
fn a_small_screen_has_the_note_about_its_column() {
    let mut screen = Screen::new(Some(host::web().pid));
    screen.take(seen(with_all_columns()));
    (0..4).for_each(|_| drop(press(&mut screen, KeyCode::Char('m'))));
    let lines = lines(&screen, 80, 7);
    assert!(lines.iter().any(|line| line == "second level: it needs root"), "{lines:?}");
    assert!(!lines.iter().any(|line| line.contains("sampled")), "{lines:?}");
}

#[test]
fn a_map_of_32_gib_fits_a_small_screen() {
    let range = WindowRange { backing: "2".repeat(16_384), ..WindowRange::default() };
    let mut screen = Screen::new(Some(host::web().pid));
    screen.take(seen(WindowMap { name: "web".into(), ranges: vec![range], ..WindowMap::default() }));
    for (width, height, cells) in [(80, 24, 64 * 16), (40, 10, 16 * 4)] {
        let rows = rows(&screen, width, height);
        let shown: usize = rows.iter().filter(|row| row.starts_with("0x")).map(|row| row[12..].len()).sum();
        assert_eq!(shown, cells, "{width} x {height}: {rows:?}");
        let legend = format!("a cell={} MiB", 2 * 16_384 / cells);
        assert!(rows.join(" ").contains(&legend), "no {legend}: {rows:?}");
    }
}

#[test]
fn the_colours_of_a_map_match_its_letters() {
    let mut screen = screen();
    press(&mut screen, KeyCode::Tab);
    let terminal = drawn(&screen, 80, 24);
    let background = |x: u16, y: u16| terminal.backend().buffer()[(x, y)].bg;
    // Rows as in the map above; a cell is two columns wide, after twelve columns for the address.
    assert_eq!(background(12, 2), Color::Magenta, "huge, mapped in base pages");
    assert_eq!(background(20, 2), Color::Blue, "huge");
    assert_eq!(background(12, 4), Color::Yellow, "base pages");
    assert_eq!(background(12, 6), Color::Cyan, "giant");
}

#[test]
fn a_window_that_became_huge_since_the_last_sample_is_underlined() {
    let mut screen = screen();
    press(&mut screen, KeyCode::Tab);
    let mut later = host::windows();
    later.ranges[0].backing.replace_range(64..65, "2");
    screen.take(seen(later));
    let terminal = drawn(&screen, 80, 24);
    let is_underlined = |x: u16, y: u16| terminal.backend().buffer()[(x, y)].modifier.contains(Modifier::UNDERLINED);
    assert!(is_underlined(12, 4), "window 64 is the first of the third row");
    assert!(!is_underlined(14, 4) && !is_underlined(12, 3), "its neighbours stayed as they were");
}

#[test]
fn the_explanation_has_every_reason_with_its_text() {
    let mut screen = screen();
    press(&mut screen, KeyCode::Tab);
    press(&mut screen, KeyCode::Enter);
    assert_eq!(screen.tab, Tab::Explain);
    let expected = [
        "wideleaf top: 3 VMs, 3 GiB free, wideleafd 0.1.0",
        "web: 64 of 128 windows are in large pages (50.0 %), scanned 72 s ago",
        "the guest itself maps: 64 windows with 2 MiB, 30 with 4 KiB, 2 with several",
        "sizes, 32 not mapped",
        "32 windows: never_touched",
        "the guest has never touched them: there is nothing to promote",
        "32 windows: holes",
        "the balloon took some of their pages; `collapse-holes` would fill them",
        "the budget said no 3 times",
        KEYS,
    ];
    assert_eq!(lines(&screen, 80, 24), expected);
}

#[test]
fn another_policy_is_chosen_from_a_list() {
    let mut screen = screen();
    press(&mut screen, KeyCode::Char('p'));
    let Overlay::Policies(at) = screen.overlay else { panic!("no policies") };
    assert!(lines(&screen, 80, 24).iter().any(|row| row.contains("policy of web")));
    let y = rows(&screen, 80, 24).iter().position(|row| row.contains("│ coverage  ")).unwrap();
    let terminal = drawn(&screen, 80, 24);
    let is_marked = |y: usize| terminal.backend().buffer()[(3, y as u16)].modifier.contains(Modifier::REVERSED);
    assert!(is_marked(y) && !is_marked(y + 1), "the present one is");
    press(&mut screen, KeyCode::Down);
    assert_eq!(screen.overlay, Overlay::Policies(at + 1));
    let effect = press(&mut screen, KeyCode::Enter);
    assert_eq!(effect, Effect::Send(WatchRequest::SetPolicy(host::web().pid, "aligned".into())));
    assert_eq!(screen.overlay, Overlay::None);
}

#[test]
fn policies_that_the_vm_would_refuse_are_not_offered() {
    let mut screen = screen();
    press(&mut screen, KeyCode::Char('p'));
    let offered = |screen: &Screen| screen.policies().map(|(name, _)| name).collect::<Vec<_>>();
    let of_qemu = offered(&screen);
    assert!(of_qemu.contains(&"auto") && of_qemu.contains(&"off"), "{of_qemu:?}");
    for refused in ["at-fault", "reservation", "prealloc", "giant"] {
        assert!(!of_qemu.contains(&refused), "{refused} needs our own VMM");
    }
    press(&mut screen, KeyCode::Esc);
    (0..2).for_each(|_| drop(press(&mut screen, KeyCode::Down)));
    let of_ours = offered(&screen);
    for refused in ["at-fault", "reservation"] {
        assert!(!of_ours.contains(&refused), "{refused} is there from a run's start or never");
    }
    assert!(["auto", "giant", "off"].iter().all(|policy| of_ours.contains(policy)), "{of_ours:?}");
    press(&mut screen, KeyCode::Char('p'));
    assert_eq!(press(&mut screen, KeyCode::Enter), Effect::None);
    assert_eq!(screen.message.as_deref(), Some("giant is in force already"));
}

#[test]
fn invisible_memory_is_shown_as_unknown_and_not_as_zero() {
    let mut screen = Screen::new(None);
    let unseen = VmView { ram: Vec::new(), backing: None, mapping: None, guest_pages: None, ..host::mail() };
    let report = HostReport { source: "looking".into(), daemon: None, vms: vec![unseen], notes: Vec::new() };
    screen.take(Sampled { host: Ok(report), detail: None, message: None });
    let row = lines(&screen, 80, 24).remove(2);
    assert_eq!(row, "mail               unmanaged              ?         ? ????????????       ?");
}

#[test]
fn the_map_and_the_explanation_show_the_guests_own_mappings() {
    let mut screen = screen();
    let expected = "the guest itself maps: 64 windows with 2 MiB, 30 with 4 KiB, 2 with several sizes, 32 not mapped";
    for _ in [Tab::Map, Tab::Explain] {
        press(&mut screen, KeyCode::Tab);
        assert!(lines(&screen, 180, 24).iter().any(|line| line.ends_with(expected)), "{:?}", screen.tab);
    }
}

#[test]
fn a_small_screen_shows_the_chosen_policy() {
    let mut screen = screen();
    press(&mut screen, KeyCode::Char('p'));
    // More key presses than policies: the last policy stays chosen.
    (0..50).for_each(|_| drop(press(&mut screen, KeyCode::Down)));
    assert!(lines(&screen, 40, 10).iter().any(|row| row.contains("off          the VM is only")));
    assert_eq!(
        press(&mut screen, KeyCode::Enter),
        Effect::Send(WatchRequest::SetPolicy(host::web().pid, "off".into()))
    );
}

#[test]
fn the_arrows_choose_a_vm_and_request_its_details() {
    let mut screen = screen();
    assert_eq!(
        press(&mut screen, KeyCode::Up),
        Effect::Send(WatchRequest::Detail(host::web().pid)),
        "it is the first already"
    );
    assert_eq!(press(&mut screen, KeyCode::Down), Effect::Send(WatchRequest::Detail(host::mail().pid)));
    press(&mut screen, KeyCode::Tab);
    assert_eq!(lines(&screen, 80, 24)[1], "looking", "what is known is of another VM");
    assert_eq!(
        press(&mut screen, KeyCode::Char('o')),
        Effect::Send(WatchRequest::SetPolicy(host::mail().pid, "off".into()))
    );
}

#[test]
fn a_chosen_vm_stays_chosen_when_the_list_changes() {
    let mut screen = screen();
    press(&mut screen, KeyCode::Down);
    let mut later = seen(host::windows());
    later.host.as_mut().unwrap().vms.remove(0);
    assert_eq!(screen.take(later), Effect::Send(WatchRequest::Detail(host::mail().pid)));
    assert_eq!(screen.chosen().unwrap().name, "mail");
}

#[test]
fn no_key_acts_on_another_vm_when_the_chosen_one_has_ended() {
    let without_web = || {
        let mut later = seen(host::windows());
        later.host.as_mut().unwrap().vms.remove(0);
        later
    };
    for code in [KeyCode::Null, KeyCode::Char('p')] {
        let mut screen = screen();
        press(&mut screen, code);
        assert_eq!(screen.take(without_web()), Effect::None);
        assert_eq!((screen.overlay, screen.message.as_deref()), (Overlay::None, Some("web has ended")));
        for code in [KeyCode::Enter, KeyCode::Char('o'), KeyCode::Char('p'), KeyCode::Enter] {
            assert_eq!(press(&mut screen, code), Effect::None, "{code:?}");
            assert_eq!(screen.overlay, Overlay::None);
        }
        assert_eq!(lines(&screen, 80, 24)[1], "the chosen VM has ended: choose another one with the arrow keys");
        assert_eq!(press(&mut screen, KeyCode::Down), Effect::Send(WatchRequest::Detail(host::mail().pid)));
        assert_eq!(
            press(&mut screen, KeyCode::Char('o')),
            Effect::Send(WatchRequest::SetPolicy(host::mail().pid, "off".into()))
        );
    }
}

#[test]
fn a_failed_refresh_keeps_the_last_state_and_says_so() {
    let mut screen = screen();
    screen.take(failed("wideleafd did not reply within 2 s"));
    let rows = rows(&screen, 80, 24);
    assert!(rows[2].starts_with("web"), "{rows:?}");
    assert_eq!(rows[22], "as last seen: wideleafd did not reply within 2 s");
    screen.take(seen(host::windows()));
    assert!(!lines(&screen, 80, 24).iter().any(|row| row.contains("as last seen")), "it came back");
}

#[test]
fn the_result_of_a_change_is_shown() {
    let mut screen = screen();
    screen.take(Sampled { message: Some("web (process 4711): aligned".into()), ..seen(host::windows()) });
    assert_eq!(rows(&screen, 80, 24)[22], "web (process 4711): aligned");
}

#[test]
fn help_lists_every_key_and_any_key_closes_it() {
    let mut screen = screen();
    press(&mut screen, KeyCode::Char('?'));
    let shown = lines(&screen, 80, 24).join("\n");
    ["↑ ↓", "Tab, Enter", "Esc", "m  ", "p  ", "o  ", "q  "]
        .iter()
        .for_each(|key| assert!(shown.contains(key), "{key}"));
    press(&mut screen, KeyCode::Char('x'));
    assert_eq!(screen.overlay, Overlay::None);
}

#[test]
fn q_quits_from_everywhere_and_control_c_interrupts() {
    for before in [KeyCode::Null, KeyCode::Char('?'), KeyCode::Char('p'), KeyCode::Tab] {
        let mut screen = screen();
        press(&mut screen, before);
        assert_eq!(press(&mut screen, KeyCode::Char('q')), Effect::Quit);
        let control_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert_eq!(screen.on_key(control_c), Effect::Interrupt);
    }
}

#[test]
fn any_screen_size_is_drawn() {
    for code in [KeyCode::Null, KeyCode::Tab, KeyCode::Char('p'), KeyCode::Char('?')] {
        let mut screen = screen();
        press(&mut screen, code);
        for (width, height) in [(1, 1), (3, 2), (12, 4), (13, 5), (200, 3)] {
            assert_eq!(rows(&screen, width, height).len(), usize::from(height));
        }
    }
}

#[test]
fn a_host_without_vms_is_not_an_error() {
    let mut screen = Screen::new(None);
    let source = WithoutDaemon::NotAsked.to_string();
    let report = HostReport { source, daemon: None, vms: Vec::new(), notes: Vec::new() };
    assert_eq!(screen.take(Sampled { host: Ok(report), detail: None, message: None }), Effect::None);
    for code in [KeyCode::Down, KeyCode::Char('o'), KeyCode::Char('p')] {
        assert_eq!(press(&mut screen, code), Effect::None);
        assert_eq!(screen.overlay, Overlay::None);
    }
    let expected = ["wideleaf top: 0 VMs, read-only: no daemon was asked", "no VM runs on this host", KEYS];
    assert_eq!(lines(&screen, 80, 24), expected);
}

#[test]
fn the_title_has_the_reason_why_no_daemon_is_the_source() {
    let title = |why: WithoutDaemon| {
        let mut screen = screen();
        let report = HostReport { source: why.to_string(), daemon: None, vms: Vec::new(), notes: Vec::new() };
        screen.take(Sampled { host: Ok(report), detail: None, message: None });
        lines(&screen, 80, 24).remove(0).replace("wideleaf top: 0 VMs, read-only: ", "")
    };
    assert_eq!(title(WithoutDaemon::Absent("/s".into())), "no wideleafd listens");
    assert_eq!(title(WithoutDaemon::NotPermitted("/s".into())), "cannot ask a wideleafd");
    assert_eq!(title(WithoutDaemon::NotAsked), "no daemon was asked");
}
