//! The table for people says what the table in the source says.

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
            let line = readme.lines().find(|line| line.contains(&name));
            let line = line.unwrap_or_else(|| panic!("{name} of {} is missing", policy.name));
            assert!(line.contains(&parameter.default_text()), "{name}: the default is not in {line:?}");
        }
    }
}
