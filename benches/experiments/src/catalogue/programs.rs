//! The programs of the published measurements, in processes and in guests, by the names of rows.
//!
//! ```text
//!   "CG B" ─▶ npb.cg --class B ── on base pages, on THP, on the hugetlb pool ─▶ a job, or the reason for its absence
//! ```

use crate::definition::{Accesses, Case, Cell, HostFacts, Job};

/// A program with its size.
#[derive(Debug)]
pub(super) struct Program {
    /// Name of the program in rows: `CG B`.
    pub name: &'static str,
    /// Unit of the figure.
    pub unit: &'static str,
    kernel: &'static str,
    parameters: &'static str,
    /// Memory that the program works on, in MiB.
    pub mib: u64,
    /// Duration of a run on one thread with set-up and check, on base pages of a fourth-generation EPYC, in seconds.
    pub seconds: f64,
}

/// What backs the memory of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pages {
    /// 4 KiB pages only.
    Base,
    /// Transparent huge pages from the start.
    Thp,
    /// Pages of the hugetlb pool.
    Hugetlb,
}

/// How the memory of a guest comes onto large pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InGuest {
    /// Not at all.
    Never,
    /// Reserved frames, promoted once they are full: FreeBSD's mechanism.
    Reservation,
    /// At the first touch.
    AtFault,
    /// As the policy `auto` decides while the guest runs.
    Auto,
    /// Pages of the hugetlb pool from the start.
    Hugetlb,
    /// Transparent huge pages from the start.
    Thp,
}

impl InGuest {
    /// Name of its arm.
    pub(super) const fn arm(self) -> &'static str {
        match self {
            InGuest::Never => "guest never",
            InGuest::Reservation => "guest reservation",
            InGuest::AtFault => "guest at-fault",
            InGuest::Auto => "guest auto",
            InGuest::Hugetlb => "guest hugetlb",
            InGuest::Thp => "guest THP",
        }
    }

    /// What the arm is.
    pub(super) const fn summary(self) -> &'static str {
        match self {
            InGuest::Never => "a guest, its RAM on 4 KiB pages",
            InGuest::Reservation => "a guest, 2 MiB frames reserved at the first touch and promoted once they are full",
            InGuest::AtFault => "a guest, 2 MiB pages at the first touch",
            InGuest::Auto => "a guest that starts on 4 KiB pages and is promoted by `auto` while it runs",
            InGuest::Hugetlb => "a guest, its RAM on 2 MiB pages of the hugetlb pool from the start",
            InGuest::Thp => "a guest, its RAM on transparent huge pages of 2 MiB from the start",
        }
    }

    /// Options of `wideleaf run`: reservations need a memfd; all others have anonymous memory.
    const fn options(self) -> [&'static str; 6] {
        let (backing, page, policy) = match self {
            InGuest::Never => ("anon", "4k", "never"),
            InGuest::Reservation => ("memfd", "4k", "reservation"),
            InGuest::AtFault => ("anon", "4k", "at-fault"),
            InGuest::Auto => ("anon", "4k", "auto"),
            InGuest::Hugetlb => ("hugetlb", "2m", "never"),
            InGuest::Thp => ("anon", "2m", "never"),
        };
        ["--backing", backing, "--host-page", page, "--policy", policy]
    }
}

const fn npb(name: &'static str, kernel: &'static str, parameters: &'static str, mib: u64, seconds: f64) -> Program {
    Program { name, unit: "Mop/s", kernel, parameters, mib, seconds }
}

const fn gups(name: &'static str, parameters: &'static str, mib: u64, seconds: f64) -> Program {
    Program { name, unit: "GUP/s", kernel: "gups", parameters, mib, seconds }
}

const fn amr(name: &'static str, parameters: &'static str, mib: u64, seconds: f64) -> Program {
    Program { name, unit: "M/s", kernel: "amr", parameters, mib, seconds }
}

const fn eos(name: &'static str, parameters: &'static str, mib: u64, seconds: f64) -> Program {
    Program { name, unit: "M/s", kernel: "eos", parameters, mib, seconds }
}

/// All programs. Durations above a minute are extrapolated from the operations of their class.
const ALL: [Program; 29] = [
    npb("BT A", "npb.bt", "class=A", 59, 17.0),
    npb("BT B", "npb.bt", "class=B", 185, 70.0),
    npb("BT C", "npb.bt", "class=C", 701, 290.0),
    npb("CG A", "npb.cg", "class=A", 29, 1.2),
    npb("CG B", "npb.cg", "class=B", 206, 32.0),
    npb("CG C", "npb.cg", "class=C", 511, 90.0),
    npb("FT A", "npb.ft", "class=A", 324, 2.0),
    npb("FT B", "npb.ft", "class=B", 1285, 24.0),
    npb("IS B", "npb.is", "class=B", 264, 2.1),
    npb("IS C", "npb.is", "class=C", 1056, 11.0),
    npb("LU A", "npb.lu", "class=A", 42, 7.0),
    npb("LU B", "npb.lu", "class=B", 144, 30.0),
    npb("LU C", "npb.lu", "class=C", 565, 120.0),
    npb("MG A", "npb.mg", "class=A", 434, 1.3),
    npb("MG B", "npb.mg", "class=B", 434, 5.3),
    npb("SP A", "npb.sp", "class=A", 63, 13.6),
    npb("SP B", "npb.sp", "class=B", 195, 60.0),
    gups("GUPS 2^25", "log2_words=25", 256, 5.0),
    gups("GUPS 2^26", "log2_words=26", 512, 10.0),
    gups("GUPS 2^27", "log2_words=27", 1024, 21.0),
    gups("GUPS 2^28", "log2_words=28", 2048, 45.0),
    Program { name: "Sweep3D 150", unit: "M/s", kernel: "sweep3d", parameters: "n=150", mib: 419, seconds: 9.7 },
    // 3 arrays of 44,739,240 words, as in LWN's run, repeated so that a run takes some seconds.
    Program {
        name: "STREAM 1 GiB",
        unit: "MB/s",
        kernel: "stream",
        parameters: "words=44739240 times=40",
        mib: 1024,
        seconds: 6.0,
    },
    amr("amr 108 MiB", "passes=80", 108, 5.0),
    amr("amr 1 GiB", "blocks=2400 passes=10", 1012, 8.0),
    amr("amr 4 GiB", "blocks=9600 passes=3", 4048, 12.0),
    amr("amr 9 GiB", "blocks=21500 passes=3", 9065, 27.0),
    eos("eos 110 MiB", "blocks=245 passes=20", 110, 4.0),
    eos("eos 1 GiB", "blocks=2680 passes=3", 1023, 8.0),
];

/// Program with this name.
///
/// # Panics
/// If there is no such program; only the experiments name programs.
pub(super) fn program(name: &str) -> &'static Program {
    ALL.iter().find(|program| program.name == name).expect("experiments name only programs of the list")
}

/// Minimum RAM that `wideleaf run` gives a kernel by default. All of it is reserved from the pool.
const RAM_MIN_MIB: u64 = 1024;

/// Longest run that has its guest arms without `--long`, in seconds. These arms double the runs of a program, and an
/// experiment takes at most half an hour.
const GUEST_SECONDS_MAX: f64 = 6.0;

/// Memory of a run beyond the kernel's data: the process and its tables.
const BESIDE_MIB: u64 = 64;

impl Program {
    /// A run on one thread.
    pub(super) fn native(&self, pages: Pages, host: &HostFacts) -> Cell {
        self.native_on(pages, 1, host)
    }

    /// A run on `threads`; absent if the host has too little memory. With `--long` threads may share CPUs, otherwise it
    /// is absent on a host with too few of them.
    pub(super) fn native_on(&self, pages: Pages, threads: u32, host: &HostFacts) -> Cell {
        if threads > host.cpus && !host.wants_long_runs {
            return Cell::Absent(format!("only with --long: {threads} threads share {}", cpus_text(host)));
        }
        if let Some(why) = self.why_not(pages == Pages::Hugetlb, host) {
            return Cell::Absent(why);
        }
        let threads_text = threads.to_string();
        let mut arguments = vec![self.kernel, "--native", "--cmdline", self.parameters, "--vcpus", &threads_text];
        arguments.extend_from_slice(match pages {
            Pages::Base => &["--host-page", "4k"],
            Pages::Thp => &["--host-page", "2m"],
            Pages::Hugetlb => &["--backing", "hugetlb", "--host-page", "2m"],
        });
        arguments.extend_from_slice(&["--policy", "never", "--no-daemon"]);
        let job = Job::run(&arguments, self.seconds / f64::from(threads.min(host.cpus)));
        Cell::of(if pages == Pages::Hugetlb { self.with_pool(job) } else { job })
    }

    /// A run in a guest with this number of vCPUs; absent if the host cannot run it.
    pub(super) fn in_guest(&self, way: InGuest, threads: u32, host: &HostFacts) -> Cell {
        if self.seconds > GUEST_SECONDS_MAX && !host.wants_long_runs {
            return self.only_with_long();
        }
        let why_no_cpus =
            || (threads > host.cpus).then(|| format!("{threads} threads: this host has {}", cpus_text(host)));
        let why_not = || self.why_not(way == InGuest::Hugetlb, host);
        let why_not = host.why_no_kvm.clone().or_else(why_no_cpus).or_else(why_not);
        if let Some(why) = why_not {
            return Cell::Absent(why);
        }
        let threads_text = threads.to_string();
        let arguments = [self.kernel, "--cmdline", self.parameters, "--vcpus", &threads_text, "--guest-page", "2m"];
        let arguments = [&arguments[..], &way.options(), &["--no-daemon"]].concat();
        let job = Job::run(&arguments, self.seconds / f64::from(threads));
        Cell::of(if way == InGuest::Hugetlb { self.with_pool(job) } else { job })
    }

    /// The job with pool pages for all of its memory.
    fn with_pool(&self, job: Job) -> Job {
        job.with_pool((self.mib.max(RAM_MIN_MIB) + BESIDE_MIB).div_ceil(2))
    }

    fn why_not(&self, needs_pool: bool, host: &HostFacts) -> Option<String> {
        let (needed, available) = (self.mib + BESIDE_MIB, host.memory_available_mib);
        if needed > available {
            return Some(format!("needs {needed} MiB: this host has {available} MiB available"));
        }
        host.why_no_pool_2m.clone().filter(|_| needs_pool)
    }

    /// A cell that is absent only because the run takes too long.
    pub(super) fn only_with_long(&self) -> Cell {
        Cell::Absent(format!("only with --long: a run takes about {:.0} s", self.seconds))
    }

    /// Accesses of `iterations` of the timed part. `order` is another parameter, for kernels that have it.
    pub(super) fn recorded(&self, order: &str, iterations: Option<u32>) -> Accesses {
        self.recorded_on(1, order, iterations)
    }

    /// The same of the first of several threads.
    pub(super) fn recorded_on(&self, threads: u32, order: &str, iterations: Option<u32>) -> Accesses {
        let parameters = format!("{} {order}", self.parameters).trim_end().to_owned();
        Accesses::Recorded { kernel: self.kernel.into(), parameters, iterations, threads }
    }

    /// A case of this program with these cells, in the order of the arms.
    pub(super) fn case(&self, cells: Vec<Cell>) -> Case {
        let is_run = |cell: &Cell| matches!(cell, Cell::Job(job) if !job.is_exact);
        let working_set_mib = if cells.iter().any(is_run) { self.mib + BESIDE_MIB } else { SIMULATED_MIB };
        Case { name: self.name.into(), unit: self.unit.into(), working_set_mib, cells }
    }
}

/// Number of the host's CPUs, in words.
pub(super) fn cpus_text(host: &HostFacts) -> String {
    format!("{} CPU{}", host.cpus, if host.cpus == 1 { "" } else { "s" })
}

/// Warmed memory of a case with simulations only. Their time does not matter, but the warming needs
/// at least one window.
const SIMULATED_MIB: u64 = 2;
