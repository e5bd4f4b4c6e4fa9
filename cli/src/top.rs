//! `wideleaf top`: shows the VMs of the host repeatedly. If standard output is not a terminal, one screen as text.
//!
//! ```text
//!   watch (a thread: asks the source) ── Sampled ──▶ screen ──▶ draw ──▶ terminal | text
//!                  ▲                                 │
//!                  └───────── WatchRequest ──────────┘◀── keys
//! ```

pub mod draw;
#[cfg(test)]
mod fake;
pub mod heat_map;
pub mod screen;
pub mod watch;

use std::io::{self, IsTerminal};
use std::time::Duration;

use clap::Args;
use ratatui::DefaultTerminal;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use ratatui::layout::Rect;
use wideleaf_run::failure::Failure;
use wideleaf_run::interrupts::Interrupts;
use wideleaf_run::text::clean;
use wideleaf_run::undo::Undo;

use crate::options::parse_duration;
use crate::output::print;
use crate::vm_source::{Source, SourceArg};
use heat_map::Column;
use screen::{Effect, Screen, Tab};
use watch::{Detail, Sampled, Watch};

/// Longest wait before a key or a sample is handled: less than a person notices.
const PATIENCE: Duration = Duration::from_millis(100);

/// Shortest interval: more frequent sampling would show little more, and load the daemon.
const INTERVAL_MIN: Duration = Duration::from_millis(100);

/// Width of a screen of text: the minimum of a terminal, and wide enough for every column.
const TEXT_WIDTH: u16 = 80;

/// Height of the text's map and of its explanation, in rows.
const TEXT_HEIGHT: u16 = 24;

/// Rows around a list: title, header, message and keys, and the actions for the VM.
const TEXT_ROWS_BESIDE_VMS: u16 = 12;

const TOP_EXAMPLES: &str = "\
Keys: up and down choose a VM; Tab shows the list, the map of its memory, why it is not huge; p another policy; o policy
off; m another column of the map; ? help; q quit.
A map has a letter per window of 2 MiB, or per power of two of them: 4, 2 and 1 for the size of the page behind it
(4 KiB, 2 MiB, 1 GiB), s if KVM maps a large page in 4 KiB, + for a mix, and its heat from 0 to 9 if a sensor measures
it. Other columns have its state, the reason why it is not large, the time until it is tried again, KVM's mapping, the
guest's own page, the age of the heat, and the NUMA node if there are several. A note below the map has the reason for
each ?, and its title the time since the latest scan of all windows.

Examples:
  All VMs, every second:
    wideleaf top

  The map of one VM:
    wideleaf top web

  One screen as text:
    wideleaf top web --once";

/// Arguments of `wideleaf top`.
#[derive(Args, Debug)]
#[command(after_long_help = TOP_EXAMPLES)]
pub struct TopArgs {
    /// Start with the map of this VM: its name, process id or libvirt UUID
    #[arg(value_name = "VM")]
    vm: Option<String>,

    /// Interval between two samples: a number with ms, s, m or h
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = parse_interval)]
    interval: Duration,

    /// Print one screen as text, then exit: the behaviour without a terminal on standard output
    #[arg(long)]
    once: bool,

    #[command(flatten)]
    source: SourceArg,
}

fn parse_interval(text: &str) -> Result<Duration, String> {
    let interval = parse_duration(text)?;
    if interval < INTERVAL_MIN {
        return Err(format!("the interval is shorter than {INTERVAL_MIN:?}: use a longer one"));
    }
    Ok(interval)
}

/// Runs the subcommand `top`.
///
/// # Errors
/// [`Failure`]; the terminal is then restored.
pub fn main(args: &TopArgs) -> Result<(), Failure> {
    let interrupts = Interrupts::install_with(crate::stderr::interrupted)?;
    let source = args.source.source()?;
    let vm = args.vm.as_deref().map(|name| source.vm(name)).transpose()?.map(|vm| vm.pid);
    if args.once || !io::stdout().is_terminal() {
        return print(&text(source.as_ref(), vm)?);
    }
    let terminal = OpenTerminal::open()?;
    run(terminal, Watch::start(source, args.interval), Screen::new(vm), &interrupts)
}

/// The terminal in use by the screen. It is restored in every case: after a panic, by ratatui's hook.
struct OpenTerminal {
    terminal: DefaultTerminal,
    _undo: Undo,
}

impl OpenTerminal {
    fn open() -> Result<OpenTerminal, Failure> {
        let opened = |terminal| OpenTerminal { terminal, _undo: Undo::at_the_end(ratatui::restore) };
        ratatui::try_init().map(opened).map_err(|error| {
            ratatui::restore();
            cannot_use_terminal(error)
        })
    }

    fn draw(&mut self, screen: &Screen) -> Result<(), Failure> {
        let drawn = self.terminal.draw(|frame| draw::draw(screen, frame.area(), frame.buffer_mut()));
        drawn.map(|_| ()).map_err(cannot_use_terminal)
    }
}

impl Drop for OpenTerminal {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

fn cannot_use_terminal(error: io::Error) -> Failure {
    Failure::Output(format!("cannot use the terminal: {error}; use --once to print one screen as text"))
}

fn run(mut terminal: OpenTerminal, watch: Watch, mut screen: Screen, interrupts: &Interrupts) -> Result<(), Failure> {
    terminal.draw(&screen)?;
    loop {
        interrupts.check()?;
        let mut effects = Vec::from_iter(next_event(&mut screen)?);
        effects.extend(watch.samples().map(|sample| screen.take(sample)));
        if !effects.is_empty() {
            terminal.draw(&screen)?;
        }
        for effect in effects {
            match effect {
                Effect::None => {}
                Effect::Quit => return Ok(()),
                Effect::Interrupt => return Err(Failure::Interrupted),
                Effect::Send(request) => watch.send(request),
            }
        }
    }
}

/// Effect of the next key or of the terminal's new size, if one comes in time.
fn next_event(screen: &mut Screen) -> Result<Option<Effect>, Failure> {
    match event::poll(PATIENCE) {
        Ok(true) => {}
        Ok(false) => return Ok(None),
        // A signal came: the loop checks which.
        Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(None),
        Err(error) => return Err(cannot_use_terminal(error)),
    }
    match event::read().map_err(cannot_use_terminal)? {
        Event::Key(key) if key.kind == KeyEventKind::Press => Ok(Some(screen.on_key(key))),
        Event::Resize(..) => Ok(Some(Effect::None)),
        _ => Ok(None),
    }
}

/// One sample as text: the list with its notes, and for a named VM its map and its explanation.
fn text(source: &dyn Source, vm: Option<u32>) -> Result<String, Failure> {
    let host = source.host()?;
    let notes: String = host.notes.iter().map(|note| clean(note) + "\n").collect();
    let detail = vm.map(|pid| detail(source, pid)).transpose()?;
    let mut screen = Screen::new(vm);
    // No request follows, because this is the only sample.
    screen.take(Sampled { host: Ok(host), detail, message: None });
    screen.tab = Tab::List;
    let vms = u16::try_from(screen.vms().len()).unwrap_or(u16::MAX);
    let mut out = text_of(&screen, vms.saturating_add(TEXT_ROWS_BESIDE_VMS)) + &notes;
    if vm.is_some() {
        for (tab, column) in [(Tab::Map, Column::Backing), (Tab::Map, Column::State), (Tab::Explain, Column::Backing)] {
            (screen.tab, screen.column) = (tab, column);
            out.push_str(&text_of(&screen, TEXT_HEIGHT));
        }
    }
    Ok(out)
}

/// Details of this process's VM, all of them.
fn detail(source: &dyn Source, pid: u32) -> Result<Detail, Failure> {
    let name = pid.to_string();
    Ok(Detail { pid, windows: Ok(source.windows(&name)?), explanation: Ok(source.explanation(&name)?) })
}

/// The rows of a screen that are not empty, without its keys.
fn text_of(screen: &Screen, height: u16) -> String {
    let area = Rect::new(0, 0, TEXT_WIDTH, height);
    let mut buffer = Buffer::empty(area);
    draw::draw(screen, area, &mut buffer);
    let row =
        |y: u16| (0..TEXT_WIDTH).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned() + "\n";
    (0..height - 1).map(row).filter(|row| row != "\n").collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use fake::Fake;

    #[test]
    fn a_failed_sample_is_a_failure_of_the_text() {
        let failed = |source: &Fake, vm| text(source, vm).map_err(|why| (why.exit_code(), why.to_string()));
        assert_eq!(failed(&Fake { is_gone: true }, None), Err((4, "the daemon is gone".into())));
        assert_eq!(failed(&Fake::default(), Some(1)), Err((2, "no VM 1".into())));
    }

    #[test]
    fn the_text_has_the_notes_of_the_host() {
        let expected = "wideleaf top: 0 VMs, read-only: no daemon was asked\nno VM runs on this host\na note\n";
        assert_eq!(text(&Fake::default(), None).expect("a sample"), expected);
    }
}
