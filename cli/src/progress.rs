//! Progress bars on a terminal. Elsewhere they are hidden, so that a log has no control characters.

use std::io::IsTerminal as _;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::stderr::BarTerminal;

/// A progress bar on a terminal; hidden anywhere else.
pub fn visible_bar(length: u64, template: &str) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template(template).expect("the templates are literals of this program");
    let terminal = ProgressDrawTarget::term_like(Box::new(BarTerminal::default()));
    ProgressBar::with_draw_target(Some(length), terminal).with_style(style)
}
