//! The policies' table in the README agrees with the table in the source.

use std::path::Path;

use wideleaf_policies::policy::POLICIES;

#[test]
fn the_readme_lists_every_policy_and_every_parameter_with_its_default() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md");
    let readme = std::fs::read_to_string(path).expect("there is a README");
    for policy in POLICIES {
        assert!(readme.contains(&format!("| `{}` |", policy.name)), "{} is missing", policy.name);
        for parameter in policy.parameters {
            let name = format!("`{}`", parameter.name);
            let default = parameter.default_text();
            let mut lines = readme.lines().filter(|line| line.contains(&name)).peekable();
            assert!(lines.peek().is_some(), "{name} of {} is missing", policy.name);
            // Two policies may have a parameter with the same name.
            assert!(lines.any(|line| line.contains(&default)), "{name} of {}: no line has {default}", policy.name);
        }
    }
}
