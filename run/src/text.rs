//! Text of a guest, without characters that control a terminal.

/// Text of a guest or of another VM, for a terminal: a control character becomes `?`, a tab a space. Otherwise a
/// guest's output or a VM's name could set the terminal's title, its colours or its clipboard.
pub fn clean(text: &str) -> String {
    let shown = |c: char| match c {
        '\t' => ' ',
        c if c.is_control() => '?',
        c => c,
    };
    text.chars().map(shown).collect()
}
