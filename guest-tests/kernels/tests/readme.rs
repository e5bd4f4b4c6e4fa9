//! The README says of each kernel what the table of kernels says.
use wideleaf_kernels::registry::MemoryNeed;
use wideleaf_kernels::{KERNELS, Kernel};

const README: &str = include_str!("../README.md");

const MIB: f64 = 1048576.0;

/// The cells of the table row that is about a kernel.
fn row_of(kernel: &Kernel) -> Option<Vec<&'static str>> {
    let begin = format!("| `{}` |", kernel.name);
    let row = README.lines().find(|line| line.starts_with(&begin))?;
    Some(row.trim_matches('|').split('|').map(str::trim).collect())
}

#[test]
fn every_kernel_has_a_section_or_a_row() {
    for kernel in KERNELS {
        let section = format!("\n## {}:", kernel.name);
        assert!(README.contains(&section) || row_of(kernel).is_some(), "{} is not in the README", kernel.name);
    }
}

#[test]
fn every_parameter_is_described() {
    for kernel in KERNELS {
        for parameter in kernel.parameters {
            assert!(README.contains(&format!("`{}`", parameter.name)), "{} {}=", kernel.name, parameter.name);
        }
    }
}

#[test]
fn every_class_has_its_memory() {
    let letters = "MiB for S, W, A, B, C (one vCPU)";
    assert!(README.contains(letters), "the rows are read by this heading");
    for kernel in KERNELS.iter().filter(|kernel| !kernel.classes.is_empty()) {
        let row = row_of(kernel).unwrap_or_else(|| panic!("{} has no row", kernel.name));
        let numbers = row.last().map_or("", |cell| cell.trim_end_matches(" in all classes"));
        let written: Vec<f64> = numbers.split(", ").map(|number| number.parse().expect("a number of MiB")).collect();
        // One number may stand for all.
        for (index, class) in kernel.classes.iter().enumerate() {
            let Ok(MemoryNeed::Bytes(bytes)) = kernel.memory_for(&format!("class={class}"), 1) else {
                panic!("{} {class}: a class has a size", kernel.name)
            };
            let (written, needed) = (written[index % written.len()], bytes as f64 / MIB);
            assert!((written - needed).abs() < 1.0, "{} {class}: {written} MiB written, {needed} needed", kernel.name);
        }
        assert!([1, kernel.classes.len()].contains(&written.len()), "{}: {numbers}", kernel.name);
    }
}
