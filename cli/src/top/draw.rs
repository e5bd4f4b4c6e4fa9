//! Draws the screen. A letter or a word repeats the meaning of every colour. The colours are among the sixteen that
//! every terminal has; blue and yellow differ for readers that cannot tell red from green.
//!
//! ```text
//!   wideleaf top: the source                       title
//!   the tab                                        list, map or explanation
//!   result of the last change, or the failure      message
//!   the keys                                       keys
//! ```

use ratatui::buffer::Buffer;
use ratatui::layout::{Constraint, Layout, Margin, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Clear, Paragraph, Widget, Wrap};
use wideleaf_control::view::{BackingView, Explanation, Reason, VmView, WindowMap};
use wideleaf_policies::PageSize;
use wideleaf_run::failure::Failure;
use wideleaf_run::text::clean;

use super::heat_map::{Backing, Column, Grid, MapCell, Row, lay_out};
use super::screen::{Overlay, Screen, Tab};
use crate::guests::tables::{
    UNKNOWN, action_line, bytes, care, coverage, guest_line, huge_line, known_bytes, percent, ram, scanned, share_of,
};
use crate::vm_source::HostReport;

/// Width from which the list shows a VM's manager and its memory.
const WIDE: u16 = 76;

/// Width from which it also shows the manager's cost and actions.
const WIDER: u16 = WIDE + WORK;

/// Width of the two columns of work, with the space after each.
const WORK: u16 = 18;

/// Width of the column of care: the minimum, and the width that fits all its texts.
const CARE: (u16, u16) = (14, 40);

/// Number of cells in a bar.
const BAR: usize = 12;

/// Columns before the cells of a map: a guest-physical address of up to 36 bits and a space. A longer address moves
/// the cells.
const ADDRESS: u16 = 12;

/// Most cells in a row of a map: 512 windows are 1 GiB.
const COLUMNS_MAX: usize = 512;

/// The two most general keys come first: a narrow terminal shows only them.
const KEYS: &str = "? help  q quit  ↑↓ VM  Tab list/map/explain  m column  p policy  o off";

const HELP: [(&str, &str); 9] = [
    ("↑ ↓", "previous VM, next VM"),
    ("Tab, Enter", "list, map of its memory, why not huge"),
    ("Esc", "back to the list"),
    ("m", "another column of the map: state, reason, ..."),
    ("p", "choose another policy for it"),
    ("o", "policy off: the VM is only observed"),
    ("?", "this"),
    ("q", "quit; the VMs stay as they are"),
    ("", "a cell that changed is underlined"),
];

/// Draws the whole screen.
pub fn draw(screen: &Screen, area: Rect, buffer: &mut Buffer) {
    let rows = [Constraint::Length(1), Constraint::Min(0), Constraint::Length(1), Constraint::Length(1)];
    let [title, body, message, keys] = Layout::vertical(rows).areas(area);
    draw_title(screen, title, buffer);
    match screen.tab {
        Tab::List => draw_list(screen, body, buffer),
        Tab::Map => draw_map(screen, body, buffer),
        Tab::Explain => draw_explanation(screen, body, buffer),
    }
    draw_message(screen, message, buffer);
    Line::from(KEYS).dim().render(keys, buffer);
    match screen.overlay {
        Overlay::None => {}
        Overlay::Help => draw_help(area, buffer),
        Overlay::Policies(at) => draw_policies(screen, at, area, buffer),
    }
}

fn draw_title(screen: &Screen, area: Rect, buffer: &mut Buffer) {
    let told_by = screen.host.as_ref().map_or_else(|| "looking".to_owned(), told_by);
    Line::from(vec![Span::from("wideleaf top").bold(), Span::from(format!(": {told_by}"))]).render(area, buffer);
}

fn told_by(host: &HostReport) -> String {
    let vms = host.vms.len();
    match &host.daemon {
        None => format!("{vms} VMs, read-only: {}", why_short(&host.source)),
        Some(daemon) => {
            let short = if daemon.is_host_short { " (short)" } else { "" };
            format!("{vms} VMs, {} free{short}, wideleafd {}", bytes(daemon.host_free), daemon.version)
        }
    }
}

/// Begin of the reason why no daemon is the source, without the socket's path and the consequences.
fn why_short(source: &str) -> String {
    let reason = source.split(':').next().unwrap_or_default();
    clean(reason.split(" at ").next().unwrap_or_default())
}

/// A failure outranks a message: the screen is then old.
fn draw_message(screen: &Screen, area: Rect, buffer: &mut Buffer) {
    match (&screen.failure, &screen.message) {
        (Some(failure), _) => Line::from(format!("as last seen: {failure}")).reversed().render(area, buffer),
        (None, Some(message)) => Line::from(message.as_str()).render(area, buffer),
        (None, None) => {}
    }
}

fn draw_list(screen: &Screen, area: Rect, buffer: &mut Buffer) {
    let Some(host) = &screen.host else { return };
    if host.vms.is_empty() {
        return Line::from("no VM runs on this host").render(area, buffer);
    }
    let actions = latest_actions(screen);
    // The VMs come first; the rest, up to a third, shows actions.
    let room_for_actions = actions.len().min(usize::from(area.height) / 3) as u16;
    let [header, list, latest] =
        Layout::vertical([Constraint::Length(1), Constraint::Min(1), Constraint::Length(room_for_actions)]).areas(area);
    header_line(area.width).bold().render(header, buffer);
    let chosen = screen.chosen_index();
    let first = chosen.map_or(0, |chosen| (chosen + 1).saturating_sub(usize::from(list.height)));
    for (row, (index, vm)) in list.rows().zip(host.vms.iter().enumerate().skip(first)) {
        let line = vm_line(vm, area.width);
        let line = if Some(index) == chosen { line.patch_style(Modifier::REVERSED) } else { line };
        line.render(row, buffer);
    }
    for (row, action) in latest.rows().zip(actions) {
        Line::from(action).render(row, buffer);
    }
}

/// Actions for the chosen VM, the latest first.
fn latest_actions(screen: &Screen) -> Vec<String> {
    let work = screen.chosen().and_then(|vm| vm.work.as_ref());
    work.map(|work| work.latest.iter().rev().map(action_line).collect()).unwrap_or_default()
}

fn name_width(width: u16) -> usize {
    if width >= WIDE { 18 } else { usize::from(width).saturating_sub(BAR + 10).max(1) }
}

/// Width that remains beside all other columns, if they are all shown.
fn care_width(width: u16) -> usize {
    usize::from((width.saturating_sub(WIDER) + CARE.0).min(CARE.1))
}

/// CPU time of the VM's manager, in seconds, and its completed actions; empty if no manager works on it.
fn work_columns(vm: &VmView) -> String {
    let Some(work) = &vm.work else { return format!(" {:>8} {:>8}", "-", "-") };
    let done: u64 = work.outcomes.values().filter_map(|outcomes| outcomes.get("done")).sum();
    format!(" {:>8.1} {done:>8}", work.total_cpu_s)
}

fn header_line(width: u16) -> Line<'static> {
    let name = format!("{:<1$} ", "VM", name_width(width));
    let care = care_width(width);
    let columns =
        if width >= WIDE { format!("{:<care$} {:>9} {:>9} ", "care", "RAM", "resident") } else { String::new() };
    let work = if width >= WIDER { format!(" {:>8} {:>8}", "CPU s", "actions") } else { String::new() };
    Line::from(format!("{name}{columns}{:<BAR$} {:>8}{work}", "4k and 2m+", "on 2m+"))
}

fn vm_line(vm: &VmView, width: u16) -> Line<'static> {
    let fixed = |text: &str, width: usize| format!("{text:<width$.width$} ");
    let mut spans = vec![Span::from(fixed(&vm.name, name_width(width)))];
    if width >= WIDE {
        spans.push(Span::from(fixed(&care(vm), care_width(width))));
        spans.push(Span::from(format!("{:>9} {:>9} ", known_bytes(ram(vm)), known_bytes(vm.resident()))));
    }
    match vm.backing {
        Some(backing) => spans.extend(bar(backing)),
        None => spans.push(Span::from(UNKNOWN.repeat(BAR)).dim()),
    }
    let missed = if vm.is_guarantee_met() == Some(false) { "!" } else { " " };
    spans.push(Span::from(format!(" {:>7}{missed}", coverage(vm))));
    if width >= WIDER {
        spans.push(Span::from(work_columns(vm)));
    }
    Line::from(spans)
}

/// RAM in large pages, in base pages, and not present.
fn bar(backing: BackingView) -> [Span<'static>; 3] {
    let all = backing.resident() + backing.unbacked;
    let cells = |part: u64| share_of(part, all).unwrap_or(0) as usize * BAR / 10_000;
    let resident = cells(backing.resident());
    let large = cells(backing.huge_2m + backing.giant_1g);
    [
        Span::from("█".repeat(large)).blue(),
        Span::from("▒".repeat(resident - large)).yellow(),
        Span::from("·".repeat(BAR - resident)),
    ]
}

fn draw_map(screen: &Screen, area: Rect, buffer: &mut Buffer) {
    let Some(map) = detail_or_why(screen, |detail| &detail.windows, area, buffer) else { return };
    let notes = notes_of_map(map, screen.column, area);
    let rows_of_notes = notes.iter().map(|note| rows_of(note, area.width)).sum();
    let rows = [Constraint::Length(1), Constraint::Min(0), Constraint::Length(2), Constraint::Length(rows_of_notes)];
    let [title, cells, legend, notes_area] = Layout::vertical(rows).areas(area);
    let guest = screen
        .chosen()
        .and_then(|vm| vm.guest_pages.as_ref())
        .map_or(String::new(), |pages| format!("; {}", guest_line(pages)));
    Line::from(map_title(map, screen.column) + &guest).render(title, buffer);
    let has_heat = map.ranges.iter().any(|range| range.heat.bytes().any(|heat| heat.is_ascii_digit()));
    let has_heat = has_heat && !matches!(screen.column, Column::Heat | Column::HeatAge);
    let cell_width = if has_heat { 2 } else { 1 };
    let room = usize::from(cells.width.saturating_sub(ADDRESS)) / cell_width;
    // A power of two, so that rows begin at round addresses.
    let columns = (1 << room.max(1).ilog2()).min(COLUMNS_MAX);
    let grid = lay_out(map, screen.before.as_ref(), columns, usize::from(cells.height));
    for (area, row) in cells.rows().zip(&grid.rows) {
        row_line(row, screen.column, has_heat).render(area, buffer);
    }
    let legend_line = legend_line(&grid, map, screen.column, has_heat);
    Paragraph::new(legend_line).wrap(Wrap { trim: true }).render(legend, buffer);
    let notes: Vec<Line<'_>> = notes.iter().map(|note| Line::from(note.as_str()).dim()).collect();
    Paragraph::new(notes).wrap(Wrap { trim: true }).render(notes_area, buffer);
}

/// Notes of a map, those about the column first, as many as fit into a third of the screen.
fn notes_of_map(map: &WindowMap, column: Column, area: Rect) -> Vec<String> {
    let mut room = area.height / 3;
    let fits = |note: &String| {
        let rows = rows_of(note, area.width);
        let does_fit = rows <= room;
        room = room.saturating_sub(rows);
        does_fit
    };
    let (about_it, others): (Vec<&String>, Vec<&String>) = map.notes.iter().partition(|note| column.is_about(note));
    about_it.into_iter().chain(others).map(|note| clean(note)).take_while(fits).collect()
}

/// Rows that a text takes, at most: words are not cut.
fn rows_of(text: &str, width: u16) -> u16 {
    let length = u16::try_from(text.chars().count()).unwrap_or(u16::MAX);
    let longest_word = text.split(' ').map(|word| word.chars().count()).max().unwrap_or(0) as u16;
    length.div_ceil(width.saturating_sub(longest_word).max(1))
}

fn map_title(map: &WindowMap, column: Column) -> String {
    let windows = map.windows();
    let large = |character: &u8| matches!(character, b'2' | b'1');
    let huge: usize = map.ranges.iter().map(|range| range.backing.bytes().filter(|b| large(b)).count()).sum();
    let share = percent(share_of(huge as u64, windows as u64));
    let of = if column == Column::Backing { String::new() } else { format!("{} of ", column.title()) };
    let scanned = scanned(map.scan_age_s);
    format!("{of}{}: {windows} windows of 2 MiB, {huge} in large pages ({share}), {scanned}", map.name)
}

fn row_line(row: &Row, column: Column, has_heat: bool) -> Line<'static> {
    let address = Span::from(format!("{:#011x} ", row.gpa)).dim();
    let cells = row.cells.iter().flat_map(|cell| {
        let heat = has_heat.then(|| Span::styled(heat_letter(cell.heat), heat_style(cell.heat)));
        [Some(Span::styled(cell.letter(column).to_string(), cell_style(cell))), heat].into_iter().flatten()
    });
    Line::from_iter(std::iter::once(address).chain(cells))
}

fn cell_style(cell: &MapCell) -> Style {
    let style = match cell.backing {
        Backing::Nothing => Style::new().fg(Color::DarkGray),
        Backing::Base => Style::new().fg(Color::Black).bg(Color::Yellow),
        Backing::Mixed => Style::new().fg(Color::Black).bg(Color::Gray),
        Backing::Split => Style::new().fg(Color::White).bg(Color::Magenta),
        Backing::Huge => Style::new().fg(Color::White).bg(Color::Blue),
        Backing::Giant => Style::new().fg(Color::Black).bg(Color::Cyan),
    };
    if cell.has_changed { style.add_modifier(Modifier::UNDERLINED | Modifier::BOLD) } else { style }
}

fn heat_letter(heat: Option<u8>) -> String {
    heat.map_or("?".to_owned(), |heat| heat.to_string())
}

fn heat_style(heat: Option<u8>) -> Style {
    match heat {
        Some(6..) => Style::new().add_modifier(Modifier::BOLD),
        Some(1..) => Style::new(),
        _ => Style::new().fg(Color::DarkGray),
    }
}

/// Meaning of the letters on the screen, and the size of a cell.
fn legend_line(grid: &Grid, map: &WindowMap, column: Column, has_heat: bool) -> Line<'static> {
    let is_shown = |backing: &Backing| grid.rows.iter().flat_map(|row| &row.cells).any(|cell| cell.backing == *backing);
    let entry = |backing: Backing| {
        let style = cell_style(&MapCell::of_legend(backing));
        [Span::styled(backing.letter().to_string(), style), Span::from(format!("={}  ", backing.meaning()))]
    };
    let other = |letter: char| Span::from(format!("{letter}={}  ", clean(&column.meaning(letter, map))));
    let mut line = match column {
        Column::Backing => Line::from_iter(Backing::ALL.into_iter().filter(is_shown).flat_map(entry)),
        _ => Line::from_iter(grid.letters(column).into_iter().map(other)),
    };
    if has_heat {
        line.push_span("0-9=heat  ");
    }
    let bytes_per_cell = PageSize::Huge2M.bytes().get() * grid.windows_per_cell as u64;
    line.push_span(format!("a cell={}", bytes(bytes_per_cell)));
    if grid.rows_left_out > 0 {
        line.push_span(format!("  {} more rows do not fit", grid.rows_left_out));
    }
    line
}

fn draw_explanation(screen: &Screen, area: Rect, buffer: &mut Buffer) {
    let Some(explanation) = detail_or_why(screen, |detail| &detail.explanation, area, buffer) else { return };
    let Explanation { reasons, guest_pages, notes, .. } = explanation;
    let mut lines = vec![Line::from(huge_line(explanation))];
    lines.extend(guest_pages.iter().map(|pages| Line::from(guest_line(pages))));
    lines.extend(reasons.iter().flat_map(reason_lines));
    lines.extend(notes.iter().map(|note| Line::from(note.as_str())));
    Paragraph::new(lines).wrap(Wrap { trim: true }).render(area, buffer);
}

fn reason_lines(reason: &Reason) -> [Line<'_>; 2] {
    let head = Line::from(format!("{} windows: {}", reason.windows, reason.name)).bold();
    [head, Line::from(reason.text.as_str())]
}

/// A part of the details of the chosen VM. If it is unknown, the reason is drawn instead.
fn detail_or_why<'a, T>(
    screen: &'a Screen,
    part: impl Fn(&'a super::watch::Detail) -> &'a Result<T, Failure>,
    area: Rect,
    buffer: &mut Buffer,
) -> Option<&'a T> {
    let why = match screen.chosen_detail().map(part) {
        Some(Ok(part)) => return Some(part),
        Some(Err(failure)) => failure.to_string(),
        None if screen.host.is_none() || screen.chosen().is_some() => "looking".to_owned(),
        None if screen.vms().is_empty() => "no VM runs on this host".to_owned(),
        None => "the chosen VM has ended: choose another one with the arrow keys".to_owned(),
    };
    Paragraph::new(why).wrap(Wrap { trim: true }).render(area, buffer);
    None
}

fn draw_help(area: Rect, buffer: &mut Buffer) {
    let lines = HELP.map(|(key, what)| Line::from(format!("{key:<10}  {what}")));
    draw_box("keys", lines.to_vec(), 0, area, buffer);
}

fn draw_policies(screen: &Screen, at: usize, area: Rect, buffer: &mut Buffer) {
    let title = screen.chosen().map_or(String::new(), |vm| format!("policy of {}", vm.name));
    let line = |(index, (name, summary)): (usize, (&str, &str))| {
        let line = Line::from(format!("{name:<11}  {summary}"));
        if index == at { line.reversed() } else { line }
    };
    draw_box(&title, screen.policies().enumerate().map(line).collect(), at, area, buffer);
}

/// A box in the middle with as many lines as fit, including `shown`.
fn draw_box(title: &str, lines: Vec<Line<'_>>, shown: usize, area: Rect, buffer: &mut Buffer) {
    let width = lines.iter().map(Line::width).max().unwrap_or(0) as u16 + 4;
    let height = lines.len() as u16 + 2;
    let outer = area.centered(Constraint::Max(width), Constraint::Max(height));
    Clear.render(outer, buffer);
    Block::bordered().title(title).render(outer, buffer);
    let inner = outer.inner(Margin::new(2, 1));
    let first = (shown + 1).saturating_sub(usize::from(inner.height));
    for (row, line) in inner.rows().zip(lines.into_iter().skip(first)) {
        line.render(row, buffer);
    }
}
