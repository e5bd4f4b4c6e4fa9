//! `wideleaf-lab trace info`: the contents of a trace, read from its first byte to its last.

use std::fmt::Write as _;
use std::path::Path;

use comfy_table::Cell;
use indicatif::{HumanBytes, HumanCount};
use serde::Serialize;
use wideleaf_memory::input_file::InputFile;
use wideleaf_trace::{Access, GRANULE_BYTES, TraceReader, VERSION};

use super::InfoArgs;
use wideleaf::output::Output;
use wideleaf::progress::visible_bar;
use wideleaf::table::{number, table};
use wideleaf_run::failure::Failure;
use wideleaf_run::interrupts::Interrupts;
use wideleaf_run::text::clean;

/// Contents of a trace, and totals.
#[derive(Debug, Serialize)]
pub struct TraceReport {
    /// Path of the file.
    pub file: String,
    /// Length of the file, in bytes.
    pub bytes: u64,
    /// Version of the format.
    pub version: u32,
    /// Unit of its addresses, in bytes.
    pub granule_bytes: u32,
    /// Name of the kernel.
    pub kernel: String,
    /// Class of the kernel; empty if it has none.
    pub class: String,
    /// Parameters of the kernel.
    pub parameters: String,
    /// Memory that the kernel worked on, in bytes.
    pub arena_bytes: u64,
    /// Requested number of iterations of the timed part; 0 if the kernel does not report it.
    pub iterations: u32,
    /// Number of iterations of the class; 0 if the kernel does not report it.
    pub class_iterations: u32,
    /// Whether the recording ended before the kernel.
    pub is_cut: bool,
    /// Counts of all phases together.
    pub totals: AccessCounts,
    /// Counts of each phase, in the order of their begins.
    pub phases: Vec<PhaseReport>,
    /// File bytes per record.
    pub bytes_per_record: f64,
    /// File bytes per load or store.
    pub bytes_per_access: f64,
    /// Memory that was touched; `None` if it is too large to track.
    pub touched: Option<Touched>,
}

/// Counts of records and accesses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct AccessCounts {
    /// Number of records.
    pub records: u64,
    /// Number of loads.
    pub reads: u64,
    /// Number of stores.
    pub writes: u64,
}

/// A phase of the kernel.
#[derive(Debug, Serialize)]
pub struct PhaseReport {
    /// Name of the phase; empty before the first.
    pub name: String,
    /// Counts of the phase.
    #[serde(flatten)]
    pub counted: AccessCounts,
}

/// Amount of memory that was touched at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Touched {
    /// Number of 64-byte lines.
    pub lines: u64,
    /// Number of 4 KiB pages.
    pub pages_4k: u64,
    /// Number of 2 MiB windows.
    pub pages_2m: u64,
}

/// Runs the subcommand `trace info`.
///
/// # Errors
/// [`Failure`] if the trace is unusable or the result could not be written.
pub fn main(args: &InfoArgs) -> Result<(), Failure> {
    let interrupts = Interrupts::install_with(wideleaf::stderr::interrupted)?;
    let output = Output::open(args.format, args.output.as_deref())?;
    let report = read(&args.file, &interrupts)?;
    output.write(&report, TraceReport::to_table)
}

fn read(path: &Path, interrupts: &Interrupts) -> Result<TraceReport, Failure> {
    let unusable =
        |why: &dyn std::fmt::Display| Failure::Input(format!("cannot read the trace {}: {why}", path.display()));
    let file = InputFile::open_stream(path).map_err(|error| unusable(&error))?;
    let bar = visible_bar(file.bytes().get(), "{wide_bar} {bytes}/{total_bytes}");
    let mut reader = TraceReader::open(file.into_file()).map_err(|error| unusable(&error))?;
    let (mut block, mut phases): (Vec<Access>, Vec<PhaseReport>) = (Vec::new(), Vec::new());
    let mut map = TouchedMap::new(reader.header().arena_bytes);
    while reader.next_block(&mut block).map_err(|error| unusable(&error))? {
        let phase = match phases.iter().position(|phase| phase.name == reader.phase()) {
            Some(index) => &mut phases[index],
            None if phases.len() == PHASES_MAX => return Err(unusable(&"it has more phases than any kernel")),
            None => phases.push_mut(PhaseReport { name: reader.phase().to_owned(), counted: AccessCounts::default() }),
        };
        block.iter().for_each(|access| phase.counted.add(access));
        if let Some(map) = &mut map {
            block.iter().for_each(|access| map.touch(access.address));
        }
        bar.set_position(reader.bytes());
        interrupts.check()?;
    }
    bar.finish_and_clear();
    let (header, totals, bytes) = (reader.header().clone(), *reader.totals(), reader.bytes());
    let per = |count: u64| if count == 0 { 0.0 } else { bytes as f64 / count as f64 };
    Ok(TraceReport {
        file: path.display().to_string(),
        bytes,
        version: VERSION,
        granule_bytes: GRANULE_BYTES,
        kernel: header.kernel,
        class: header.class,
        parameters: header.parameters,
        arena_bytes: header.arena_bytes,
        iterations: header.iterations,
        class_iterations: header.class_iterations,
        is_cut: totals.is_cut,
        totals: AccessCounts { records: totals.records, reads: totals.reads, writes: totals.writes },
        phases,
        bytes_per_record: per(totals.records),
        bytes_per_access: per(totals.accesses()),
        touched: map.map(|map| map.touched()),
    })
}

/// Most phases that are counted: kernels have up to some dozen.
const PHASES_MAX: usize = 10_000;

impl AccessCounts {
    fn add(&mut self, access: &Access) {
        self.records += 1;
        let accesses = if access.is_write { &mut self.writes } else { &mut self.reads };
        *accesses = accesses.saturating_add(u64::from(access.repeats));
    }
}

/// A bit for each line of the touched windows: 4 KiB per window.
struct TouchedMap(Vec<Option<Box<[u64; PAGES]>>>);

const WINDOW_BYTES: u64 = 2 << 20;
const PAGE_BYTES: u64 = 4 << 10;
/// Pages of a window; the lines of a page are the bits of a word.
const PAGES: usize = (WINDOW_BYTES / PAGE_BYTES) as usize;
const _: () =
    assert!(PAGE_BYTES / GRANULE_BYTES as u64 == u64::BITS as u64, "a word has a bit for each line of a page");
/// Larger memory is not tracked: this limits the map to 256 MiB, whatever a file claims.
const ARENA_MAX: u64 = 128 << 30;

impl TouchedMap {
    fn new(arena_bytes: u64) -> Option<Self> {
        (arena_bytes <= ARENA_MAX).then(|| Self(vec![None; arena_bytes.div_ceil(WINDOW_BYTES) as usize]))
    }

    fn touch(&mut self, address: u64) {
        let window = self.0[(address / WINDOW_BYTES) as usize].get_or_insert_with(|| Box::new([0; PAGES]));
        let page = (address % WINDOW_BYTES / PAGE_BYTES) as usize;
        window[page] |= 1 << (address % PAGE_BYTES / u64::from(GRANULE_BYTES));
    }

    fn touched(&self) -> Touched {
        let windows = || self.0.iter().flatten();
        let pages = || windows().flat_map(|window| window.iter());
        Touched {
            lines: pages().map(|page| u64::from(page.count_ones())).sum(),
            pages_4k: pages().filter(|page| **page != 0).count() as u64,
            pages_2m: windows().count() as u64,
        }
    }
}

impl TraceReport {
    /// The report as a table for people.
    pub fn to_table(&self) -> String {
        let TraceReport { file, version, .. } = self;
        // A trace may come from a stranger and contain control sequences for a terminal.
        let [kernel, class, parameters] = [&self.kernel, &self.class, &self.parameters].map(|text| clean(text));
        let class = if class.is_empty() { String::new() } else { format!(".{class}") };
        let mut out = format!("{file}: {kernel}{class} {parameters}\n");
        let cut = if self.is_cut { ", cut before the kernel's end" } else { "" };
        let _ =
            writeln!(out, "  {}, version {version}, lines of {} B{cut}", HumanBytes(self.bytes), self.granule_bytes);
        if self.class_iterations > 0 {
            let _ = writeln!(out, "  {} of {} iterations", self.iterations, self.class_iterations);
        }
        let _ = writeln!(
            out,
            "  {:.3} B per record, {:.3} B per load or store",
            self.bytes_per_record, self.bytes_per_access
        );
        let _ = match self.touched {
            Some(Touched { lines, pages_4k, pages_2m }) => writeln!(
                out,
                "  touched {} of {}: {lines} lines, {pages_4k} pages of 4 KiB, {pages_2m} windows of 2 MiB",
                HumanBytes(lines * u64::from(GRANULE_BYTES)),
                HumanBytes(self.arena_bytes)
            ),
            None => {
                writeln!(out, "  memory of {}; too large to count the touched part", HumanBytes(self.arena_bytes))
            }
        };
        let mut rows = table(&["phase", "records", "loads", "stores"]);
        let whole = PhaseReport { name: "all".to_owned(), counted: self.totals };
        for PhaseReport { name, counted } in self.phases.iter().chain([&whole]) {
            let counts = [counted.records, counted.reads, counted.writes].map(|count| number(HumanCount(count)));
            rows.add_row([Cell::new(name)].into_iter().chain(counts));
        }
        let _ = writeln!(out, "{rows}");
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_pages_and_windows_are_counted_once() {
        let mut map = TouchedMap::new(3 * WINDOW_BYTES + 1).expect("it is small");
        // The first line twice, the last of its page, the next page, and the first line of the last window.
        [0, 0, 4032, 4096, 3 * WINDOW_BYTES].into_iter().for_each(|address| map.touch(address));
        assert_eq!(map.touched(), Touched { lines: 4, pages_4k: 3, pages_2m: 2 });
    }

    #[test]
    fn memory_beyond_the_limit_is_not_tracked() {
        assert!(TouchedMap::new(ARENA_MAX + 1).is_none());
    }
}
