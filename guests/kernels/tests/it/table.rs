//! A run behaves as the table of kernels says: memory, figure and classes. No kernel is named here, so that a new
//! one is covered by its entry in the table.
use crate::runner::{has, run, run_with};
use wideleaf_kernels::npb::classes::Class;
use wideleaf_kernels::registry::MemoryNeed;
use wideleaf_kernels::text::Size;
use wideleaf_kernels::{KERNELS, Kernel, KernelError};
use wideleaf_protocol::ExitCode;

const PAGE_BYTES: u64 = 4096;

/// The quick run of each kernel.
fn quick_lines() -> impl Iterator<Item = (&'static Kernel, String)> {
    KERNELS.iter().map(|kernel| (kernel, format!("{} {}", kernel.name, kernel.quick)))
}

/// The lines that start a kernel in each of its sizes.
fn lines_of(kernel: &Kernel) -> Vec<String> {
    let of_class = |class: &Class| format!("{} class={class}", kernel.name);
    kernel.classes.iter().map(of_class).chain([kernel.name.to_string()]).collect()
}

/// Bytes of a run, unless the kernel takes all available memory.
fn bytes_of(kernel: &Kernel, line: &str, vcpus: usize) -> Option<u64> {
    match kernel.memory_for(line, vcpus) {
        Ok(MemoryNeed::Bytes(bytes)) => Some(bytes),
        Ok(MemoryNeed::AllThereIs) => None,
        Err(error) => panic!("{line}: {error}"),
    }
}

#[test]
fn every_size_is_refused_for_exactly_the_memory_that_the_table_says() {
    for kernel in KERNELS {
        let vcpus_max = kernel.vcpus_max.min(3);
        for (line, vcpus) in lines_of(kernel).iter().flat_map(|line| (1..=vcpus_max).map(move |vcpus| (line, vcpus))) {
            let Some(bytes) = bytes_of(kernel, line, vcpus) else { continue };
            let (code, lines) = run(vcpus, 1, line);
            let refusal = format!("panic message=needs {} of memory, but has 4 KiB", Size(bytes));
            assert!(code == ExitCode::Unsupported && has(&lines, &refusal), "{line}, {bytes} bytes: {lines:#?}");
        }
    }
}

#[test]
fn a_quick_run_passes_in_the_memory_that_the_table_says_and_prints_its_figure() {
    let both =
        |quick: (&'static Kernel, String)| (1..=quick.0.vcpus_max.min(2)).map(move |vcpus| (quick.clone(), vcpus));
    for ((kernel, line), vcpus) in quick_lines().flat_map(both) {
        let pages = bytes_of(kernel, &line, vcpus).unwrap_or(64 * PAGE_BYTES).div_ceil(PAGE_BYTES);
        let (code, lines) = run(vcpus, pages as usize, &line);
        assert_eq!(code, ExitCode::Success, "{line}, {vcpus} vCPUs: {lines:#?}");
        let begin = format!("result name={} value=", kernel.figure.name);
        let figures: Vec<_> = lines.iter().filter(|line| line["@wideleaf ".len()..].starts_with(&begin)).collect();
        let unit = format!(" unit={}", kernel.figure.unit);
        assert!(figures.len() == 1 && figures[0].ends_with(&unit), "{line}: {lines:#?}");
    }
}

#[test]
fn without_a_known_clock_no_figure_is_printed() {
    for (kernel, line) in quick_lines() {
        let pages = bytes_of(kernel, &line, 1).unwrap_or(64 * PAGE_BYTES).div_ceil(PAGE_BYTES);
        let (code, lines) = run_with(1, 0, pages as usize, &line, |_, _| ());
        assert_eq!(code, ExitCode::Success, "{line}: {lines:#?}");
        assert!(!has(&lines, &format!("result name={} ", kernel.figure.name)), "{line}: {lines:#?}");
    }
}

#[test]
fn a_kernel_takes_a_class_where_it_has_classes() {
    for kernel in KERNELS {
        let takes_class = kernel.parameters.contains(&Class::PARAMETER);
        assert_eq!(takes_class, !kernel.classes.is_empty(), "{}", kernel.name);
        assert!(kernel.classes.is_sorted(), "{}: the smallest class comes first", kernel.name);
    }
}

#[test]
fn only_a_kernel_with_classes_names_its_class_after_hello() {
    for kernel in KERNELS {
        let classes = kernel.classes.iter().map(|class| format!("{} class={class}", kernel.name));
        for line in classes.chain([format!("{} {}", kernel.name, kernel.quick)]) {
            // The smallest possible arena: most runs end with a refusal, which comes later.
            let (_, lines) = run_with(1, 0, 1, &line, |_, _| ());
            let letter = line.split_once("class=").map(|(_, letter)| letter);
            let expected = letter.map(|letter| format!("problem class={letter} "));
            let second = &lines[1]["@wideleaf ".len()..];
            assert_eq!(second.starts_with("problem "), expected.is_some(), "{line}: {lines:#?}");
            assert!(second.starts_with(expected.as_deref().unwrap_or_default()), "{line}: {lines:#?}");
        }
    }
}

#[test]
fn more_vcpus_than_a_kernel_can_use_are_refused() {
    for (kernel, line) in quick_lines() {
        let (vcpus, most) = (kernel.vcpus_max + 1, kernel.vcpus_max);
        assert_eq!(kernel.memory_for(&line, vcpus), Err(KernelError::TooManyVcpus { vcpus, most }), "{line}");
        assert!(kernel.memory_for(&line, most).is_ok(), "{line}");
    }
}

#[test]
fn names_are_unique() {
    for (index, kernel) in KERNELS.iter().enumerate() {
        assert!(KERNELS[..index].iter().all(|other| other.name != kernel.name), "{}", kernel.name);
    }
}
