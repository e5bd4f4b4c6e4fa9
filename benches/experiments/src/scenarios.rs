//! The scenarios: benches of whole guests and machines, with their own `main` (`benches/scenarios/`). They are listed
//! beside the experiments, and run by `cargo bench`.

/// A scenario of `cargo bench`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scenario {
    /// Name of the bench.
    pub name: &'static str,
    /// Question that the bench answers.
    pub question: &'static str,
    /// Sum of the turns and pauses that its source fixes, with default arguments, in minutes, without the start of
    /// guests and the filling of their memory. `None` if the machine alone decides.
    pub minutes: Option<u32>,
}

impl Scenario {
    /// Command that runs the scenario in the source folder.
    pub fn command(&self) -> String {
        format!("cargo bench -p wideleaf-benches --bench {}", self.name)
    }
}

const fn scenario(name: &'static str, question: &'static str, minutes: Option<u32>) -> Scenario {
    Scenario { name, question, minutes }
}

/// All scenarios, in the order of the list.
pub const ALL: [Scenario; 21] = [
    scenario("swap", "how fast is a promotion by swap, compared with collapse and memcpy?", None),
    scenario("trade", "what does it take to give a cold window's huge page to a hot one?", None),
    scenario("giant", "how long does a move to 1 GiB and back pause a guest that writes?", Some(1)),
    scenario("memslots", "what does a memslot cost, by its size?", None),
    scenario("interleaved", "are promoted pages as good as huge pages from the start?", Some(2)),
    scenario("half_sparse", "does `auto` have the speed of huge pages and the memory of base pages?", Some(2)),
    scenario("khugepaged", "how much faster than khugepaged is `auto`, and at what CPU time?", Some(3)),
    scenario("sensing", "what does sensing cost a guest and the host?", Some(4)),
    scenario("first_seconds", "what does `auto` cost a guest that gains nothing by it, in its first seconds?", Some(6)),
    scenario("dip", "how slow is a guest while it is promoted, and what does that cost over 30 s?", Some(7)),
    scenario("returns", "how soon is a hot set on 2 MiB pages again after it was made small?", Some(2)),
    scenario("restore_ram", "how fast is RAM filled into huge pages, compared with copies of pages?", Some(1)),
    scenario("moves", "how long do saves and migrations pause a guest at work, and how slow is it?", Some(3)),
    scenario("attached", "what is attaching to a QEMU guest worth, and what does it cost the guest?", Some(2)),
    scenario("attached_idle", "what does wideleafd cost beside 50 guests that stand?", Some(2)),
    scenario("kernels", "are the benchmark kernels as fast as published ones, and what does a guest cost?", None),
    scenario("walk", "how many accesses a second does the TLB simulator make?", None),
    scenario("boot", "how soon does a guest print its first byte, compared with QEMU?", None),
    scenario("disk", "how fast is a guest's disk, compared with QEMU?", None),
    scenario("net", "how fast is a guest's network card, compared with QEMU?", None),
    scenario("footprint", "how much memory does a VM take beside its guest's RAM?", None),
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_scenario_of_the_benches_is_in_the_list_and_nothing_else() {
        let manifest = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml"));
        let manifest = manifest.expect("the manifest of the benches is one folder up");
        let path = |line: &str| line.strip_prefix("path = \"scenarios/")?.strip_suffix(".rs\"").map(str::to_owned);
        let benches: BTreeSet<String> = manifest.lines().filter_map(path).collect();
        let listed: BTreeSet<String> = ALL.iter().map(|scenario| scenario.name.to_owned()).collect();
        assert_eq!(listed, benches);
        assert_eq!(listed.len(), ALL.len(), "each once");
        for Scenario { name, .. } in ALL {
            let both = format!("name = \"{name}\"\npath = \"scenarios/{name}.rs\"");
            assert!(manifest.contains(&both), "the bench {name} has the name of its file");
        }
    }

    #[test]
    fn a_scenario_has_its_command_and_its_time() {
        let sensing = ALL.iter().find(|scenario| scenario.name == "sensing").expect("in the list");
        assert_eq!(sensing.command(), "cargo bench -p wideleaf-benches --bench sensing");
        assert_eq!(sensing.minutes, Some(4));
    }
}
