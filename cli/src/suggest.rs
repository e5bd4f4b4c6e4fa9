//! The name that a mistyped one was meant for: `gupz` and `GUPS` are `gups`.

/// How alike two names have to be, from 0 to 1 (Jaro). `gready` and `greedy` are 0.82; `linpack` and the nearest
/// kernel 0.57. clap, whose
/// suggestions these stand beside, takes 0.7 for options; kernels have shorter names, which are sooner alike.
const ALIKE: f64 = 0.75;

/// What to add to a refusal: the name nearest to what was typed; nothing where none is near.
pub fn did_you_mean<'a>(typed: &str, names: impl IntoIterator<Item = &'a str>) -> String {
    let typed = typed.to_lowercase();
    let rated = names.into_iter().map(|name| (strsim::jaro(&typed, name), name));
    let nearest = rated.filter(|(likeness, _)| *likeness >= ALIKE).max_by(|(a, _), (b, _)| a.total_cmp(b));
    nearest.map_or(String::new(), |(_, name)| format!("; did you mean {name}?"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_of_a_finger_has_a_suggestion_and_another_word_has_none() {
        let names = ["gups", "stream", "npb.cg", "npb.ep", "greedy", "giant", "never"];
        let hint = |typed| did_you_mean(typed, names);
        for (typed, meant) in [("gupz", "gups"), ("GUPS", "gups"), ("gready", "greedy"), ("NPB.CG", "npb.cg")] {
            assert_eq!(hint(typed), format!("; did you mean {meant}?"), "{typed}");
        }
        assert_eq!((hint("linpack"), hint("vmlinux"), hint("")), Default::default());
    }
}
