//! The control socket's tests, in one program.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod readme;
mod server_stop;
mod vm_readme;

/// The messages of a document that begin with `mark`, each in one line. Where a message is broken, at a blank or
/// between two fields, its other lines are indented.
fn examples(document: &str, mark: &str) -> Vec<String> {
    let mut messages = Vec::new();
    let mut lines = document.lines().peekable();
    while let Some(line) = lines.next() {
        let Some(start) = line.strip_prefix(mark) else { continue };
        let mut message = start.to_owned();
        while let Some(more) = lines.next_if(|next| next.starts_with("    ")) {
            message.push(' ');
            message.push_str(more.trim_start());
        }
        messages.push(message);
    }
    messages
}
