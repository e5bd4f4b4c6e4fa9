//! What a manager would do to a guest, from one survey. It changes nothing.

use wideleaf_control::view::Reason;
use wideleaf_memory::explain::WhyNot;
use wideleaf_policies::PageSize;

use super::error::AttachError;
use super::settings::{Settings, check, otherwise};
use crate::process::VmProcess;
use crate::survey::Survey;

/// Actions that would be taken on a guest, and those that would not, one line each. It changes nothing.
///
/// # Errors
/// [`AttachError`] where the policy cannot manage this guest.
pub fn plan(process: &VmProcess, settings: &Settings) -> Result<Vec<String>, AttachError> {
    check(settings.policy.as_ref())?;
    let survey = Survey::take(process, settings.qmp.as_deref());
    let explanation = survey.reasons(settings.may_collapse_shared, otherwise(settings));
    let (Some(huge), Some(windows)) = (explanation.huge, explanation.windows) else { return Ok(explanation.notes) };
    let mib = |windows: u64| windows * (PageSize::Huge2M.bytes().get() >> 20);
    let line = |reason: &Reason| match (reason.name.as_str(), &settings.policy) {
        (name, Some(policy)) if name == WhyNot::NotChosen.name() => {
            format!("{} windows ({} MiB) may be promoted, as {policy} chooses", reason.windows, mib(reason.windows))
        }
        (name, None) if name == WhyNot::PolicyNeverPromotes.name() => {
            format!("{} windows are only observed: the policy is off", reason.windows)
        }
        _ => format!("{} windows stay as they are: {}", reason.windows, reason.text),
    };
    let mut lines = vec![format!("{huge} of {windows} windows are huge already")];
    lines.extend(explanation.reasons.iter().map(line));
    lines.extend(explanation.notes);
    Ok(lines)
}
