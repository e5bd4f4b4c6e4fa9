//! The intended name behind a mistyped one: `gupz` and `GUPS` mean `gups`.

/// Least similarity of two names, from 0 to 1 (Jaro). `gready` and `greedy` have 0.82, `linpack` and the nearest
/// kernel 0.57. clap, with its suggestions beside these, uses 0.7 for options; kernels have shorter names,
/// which are similar more often.
const ALIKE: f64 = 0.75;

/// Suffix of an error: the name nearest to the typed one; empty if none is near.
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
    fn a_typing_error_has_a_suggestion_and_another_word_has_none() {
        let names = ["gups", "stream", "npb.cg", "npb.ep", "greedy", "giant", "never"];
        let hint = |typed| did_you_mean(typed, names);
        for (typed, meant) in [("gupz", "gups"), ("GUPS", "gups"), ("gready", "greedy"), ("NPB.CG", "npb.cg")] {
            assert_eq!(hint(typed), format!("; did you mean {meant}?"), "{typed}");
        }
        assert_eq!((hint("linpack"), hint("vmlinux"), hint("")), Default::default());
    }
}
