//! Command lines as a user would type them, for reports. Nothing runs them.

/// Arguments quoted for a shell.
pub(crate) fn typed(arguments: &[String]) -> String {
    let is_plain = |argument: &str| {
        !argument.is_empty() && argument.chars().all(|c| c.is_ascii_alphanumeric() || "-_./:=,@%+".contains(c))
    };
    let quote = |argument: &String| match is_plain(argument) {
        true => argument.clone(),
        false => format!("'{}'", argument.replace('\'', r"'\''")),
    };
    arguments.iter().map(quote).collect::<Vec<_>>().join(" ")
}
