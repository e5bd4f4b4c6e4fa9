//! Experiments as data, and what their results say. Nothing in this crate runs a program, reads a clock or reads a
//! file: an experiment is data, and so are its results. A test can therefore check a definition, a schedule, a
//! comparison and a report without a guest. The command line makes the runs (`wideleaf-lab experiment`).
//!
//! ```text
//!   catalogue ──▶ Experiment: cases × arms, a job in each cell
//!                    │ schedule: which run is next, how long the rest takes
//!                    ▼
//!            (the command line runs the job) ──▶ Results: a run for each turn, with its metrics
//!                    │ wideleaf-measure: ratios within a round, median, 95 % interval
//!                    ▼
//!                 report: sections ──▶ table | Markdown | HTML with SVG         compare: two results
//! ```
//!
//! | module | what it is |
//! |---|---|
//! | [`definition`] | an experiment as data |
//! | [`catalogue`] | all experiments, one file each |
//! | [`disturbance`] | QEMU guests, and events that take huge pages from them |
//! | [`each_guest`] | the figures of each of several guests that run at the same time |
//! | `time_to_coverage` | times to 95 % coverage, which some rounds do not reach |
//! | [`restoring`] | a guest that is saved and restored in one of several ways; its time to full speed |
//! | [`peers`] | other ways to large pages, with the same guest image: host THP, hugetlb, QEMU |
//! | `guest`, `host_facts`, `command_line` | parts of a definition: a guest, the host, a command as it is shown |
//! | [`schedule`] | the order of the runs |
//! | [`results`] | the stored form of the results |
//! | [`metric`] | the quantities that a run can report, their units, and which direction is better |
//! | [`published`] | published measurements by other authors |
//! | [`report`] | results as text, Markdown, HTML and SVG |
//! | [`compare`] | a comparison of two results of one experiment |
//! | [`scenarios`] | the list of the scenarios, which `cargo bench` runs |

pub mod catalogue;
mod command_line;
pub mod compare;
pub mod definition;
pub mod disturbance;
pub mod each_guest;
mod guest;
mod host_facts;
pub mod metric;
pub mod peers;
pub mod published;
pub mod report;
pub mod restoring;
pub mod results;
pub mod scenarios;
pub mod schedule;
mod time_to_coverage;
