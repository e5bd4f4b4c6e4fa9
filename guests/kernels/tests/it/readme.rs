//! The README describes each kernel as the table of kernels does.
use wideleaf_kernels::registry::MemoryNeed;
use wideleaf_kernels::{KERNELS, Kernel};

const README: &str = include_str!("../../README.md");

/// Heading of the column with a kernel's memory by class.
const MEMORY_COLUMN: &str = "MiB for S, W, A, B, C (one vCPU)";

/// The last cell of a kernel's table row.
fn last_cell_of(kernel: &Kernel) -> Option<&'static str> {
    let begin = format!("| `{}` |", kernel.name);
    let row = README.lines().find(|line| line.starts_with(&begin))?;
    row.trim_end_matches([' ', '|']).rsplit(" | ").next()
}

/// Memory by class in MiB, in the order of the classes.
fn mebibytes_of(kernel: &Kernel) -> Vec<f64> {
    let bytes = kernel.classes.iter().map(|class| match kernel.memory_for(&format!("class={class}"), 1) {
        Ok(MemoryNeed::Bytes(bytes)) => bytes,
        other => panic!("{} {class}: a class has a size, not {other:?}", kernel.name),
    });
    bytes.map(|bytes| bytes as f64 / 1_048_576.0).collect()
}

/// Whether a cell has these numbers, each rounded up or down. One number may stand for all.
fn says(cell: &str, mebibytes: &[f64]) -> bool {
    let written: Result<Vec<f64>, _> = cell.trim_end_matches(" in all classes").split(", ").map(str::parse).collect();
    written.is_ok_and(|written| {
        let is_close = |(written, needed): (&f64, &f64)| (written - needed).abs() < 1.0;
        [1, mebibytes.len()].contains(&written.len()) && written.iter().cycle().zip(mebibytes).all(is_close)
    })
}

/// The section about a kernel, with its heading: its own, or that of its family (`npb.*`).
fn section_of(kernel: &Kernel) -> &'static str {
    let name = kernel.name.as_str();
    let family = name.split_once('.').map_or(name.to_owned(), |(family, _)| format!("{family}.*"));
    let section = README.split("\n## ").find(|section| section.starts_with(&format!("{family}:")));
    section.unwrap_or_else(|| panic!("{name} has no section"))
}

/// Whether a row of the section's tables describes a parameter: its first cell names the parameter, and is not only
/// for another kernel.
fn describes(section: &str, kernel: &Kernel, parameter: &str) -> bool {
    let cells = section.lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").next());
    let is_meant = |cell: &str| !cell.contains("(only") || cell.contains(&format!("(only `{}`)", kernel.name));
    cells.filter(|cell| is_meant(cell)).any(|cell| cell.contains(&format!("`{parameter}`")))
}

#[test]
fn every_kernel_has_a_section_or_a_row() {
    let is_missing =
        |kernel: &&Kernel| !README.contains(&format!("\n## {}:", kernel.name)) && last_cell_of(kernel).is_none();
    let missing: Vec<_> = KERNELS.iter().filter(is_missing).map(|kernel| kernel.name.as_str()).collect();
    assert!(missing.is_empty(), "not in the README: {missing:?}");
}

#[test]
fn every_parameter_is_described_in_the_section_of_its_kernel() {
    let parameters = KERNELS.iter().flat_map(|kernel| kernel.parameters.iter().map(move |one| (kernel, one.name)));
    let missing: Vec<_> = parameters
        .filter(|(kernel, name)| !describes(section_of(kernel), kernel, name))
        .map(|(kernel, name)| format!("{} {name}=", kernel.name))
        .collect();
    assert!(missing.is_empty(), "not in the README: {missing:?}");
}

#[test]
fn every_class_has_its_memory() {
    assert!(README.contains(MEMORY_COLUMN), "the last cells are read as this column");
    let with_classes = KERNELS.iter().filter(|kernel| !kernel.classes.is_empty());
    let wrong: Vec<_> = with_classes
        .map(|kernel| (kernel.name.as_str(), last_cell_of(kernel).unwrap_or("no row"), mebibytes_of(kernel)))
        .filter(|(_, cell, mebibytes)| !says(cell, mebibytes))
        .collect();
    assert!(wrong.is_empty(), "kernel, MiB in the README, MiB needed: {wrong:.1?}");
}
