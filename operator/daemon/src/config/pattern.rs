//! Names with `*` (any characters, or none) and `?` (one character), as a shell has them.

use serde::Deserialize;

/// A pattern for VMs' names.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct Pattern(String);

impl Pattern {
    /// Whether the pattern matches all of `name`.
    ///
    /// After a `*` the rest is tried at each later character. Only the last `*` is ever tried again, since it can
    /// also match what an earlier one could. So it takes at most length × length steps, whatever the pattern.
    pub fn is_match(&self, name: &str) -> bool {
        let (pattern, name): (Vec<char>, Vec<char>) = (self.0.chars().collect(), name.chars().collect());
        let (mut p, mut n) = (0, 0);
        let mut last_star: Option<(usize, usize)> = None;
        while n < name.len() {
            match pattern.get(p) {
                Some('*') => {
                    last_star = Some((p, n));
                    p += 1;
                }
                Some(&c) if c == '?' || c == name[n] => {
                    p += 1;
                    n += 1;
                }
                _ => {
                    let Some((star, swallowed)) = last_star else { return false };
                    last_star = Some((star, swallowed + 1));
                    p = star + 1;
                    n = swallowed + 1;
                }
            }
        }
        pattern[p..].iter().all(|&c| c == '*')
    }
}

impl std::fmt::Display for Pattern {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<&str> for Pattern {
    fn from(text: &str) -> Pattern {
        Pattern(text.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition as written, exponential in the number of stars.
    fn by_definition(pattern: &[char], name: &[char]) -> bool {
        match pattern.split_first() {
            None => name.is_empty(),
            Some(('*', rest)) => (0..=name.len()).any(|skip| by_definition(rest, &name[skip..])),
            Some((c, rest)) => {
                name.split_first().is_some_and(|(n, name)| (*c == '?' || c == n) && by_definition(rest, name))
            }
        }
    }

    #[test]
    fn a_pattern_is_the_whole_name() {
        assert!(Pattern::from("web*").is_match("web-1") && Pattern::from("*").is_match(""));
        assert!(!Pattern::from("web").is_match("web-1") && !Pattern::from("?").is_match(""));
    }

    proptest! {
        #[test]
        fn it_agrees_with_the_definition(pattern in "[ab*?]{0,8}", name in "[ab]{0,8}") {
            let chars = |text: &str| text.chars().collect::<Vec<char>>();
            let expected = by_definition(&chars(&pattern), &chars(&name));
            prop_assert_eq!(Pattern::from(pattern.as_str()).is_match(&name), expected);
        }
    }
}
