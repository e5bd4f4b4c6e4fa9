//! What is measured and what it says. Nothing here runs anything, reads a clock or a file: an experiment is data, and so are its results, so that
//! a definition, a schedule, a comparison and a report can be tested without a guest. The command line makes the runs
//! (`wideleaf experiment`).
//!
//! ```text
//!   catalogue ──▶ Experiment: cases × arms, a job in each cell
//!                    │ schedule: which run is next, how long the rest takes
//!                    ▼
//!            (the command line runs the job) ──▶ Results: a run for each turn, with its metrics
//!                    │ statistics: ratios within a round, median, 95 % interval
//!                    ▼
//!                 report: sections ──▶ table | Markdown | HTML with SVG         compare: two results
//! ```
//!
//! | module | what it is |
//! |---|---|
//! | [`definition`] | an experiment as data |
//! | [`catalogue`] | the experiments there are, a file each |
//! | [`peers`] | guests of ours and of others with the same image |
//! | [`schedule`] | whose turn it is |
//! | [`results`] | what is stored |
//! | [`metric`] | what can be measured, its unit, and which way is better |
//! | [`seeds`] | what others measured |
//! | [`statistics`] | medians and their intervals |
//! | [`report`] | what results say, for people |
//! | [`compare`] | what two results of one experiment say of each other |

pub mod catalogue;
pub mod compare;
pub mod definition;
pub mod metric;
pub mod peers;
pub mod report;
pub mod results;
pub mod schedule;
pub mod seeds;
pub mod statistics;
