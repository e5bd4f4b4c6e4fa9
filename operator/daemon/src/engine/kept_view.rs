//! A view of a VM that the daemon keeps: by the time that a client sees it, its scan is older than when the view was
//! made.

use std::ops::Deref;
use std::time::Instant;

use wideleaf_control::view::{VmView, aged};

/// A view, and when it came.
#[derive(Clone, Debug)]
pub(super) struct KeptView {
    view: VmView,
    since: Instant,
}

impl KeptView {
    /// The view as it is to be shown at `now`.
    pub(super) fn shown(&self, now: Instant) -> VmView {
        let scan_age_s = aged(self.view.scan_age_s, now.saturating_duration_since(self.since));
        VmView { scan_age_s, ..self.view.clone() }
    }
}

impl From<VmView> for KeptView {
    fn from(view: VmView) -> KeptView {
        KeptView { view, since: Instant::now() }
    }
}

/// The view as it came.
impl Deref for KeptView {
    type Target = VmView;

    fn deref(&self) -> &VmView {
        &self.view
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guests::fake::FakeGuests;
    use std::time::Duration;

    #[test]
    fn a_scan_is_older_when_the_view_is_shown_and_an_unknown_age_stays_unknown() {
        let unknown = FakeGuests::default().started_view(7);
        let shown = |scan_age_s| {
            let kept = KeptView::from(VmView { scan_age_s, ..unknown.clone() });
            kept.shown(kept.since + Duration::from_secs(2))
        };
        assert_eq!((shown(Some(70.0)).scan_age_s, shown(None)), (Some(72.0), unknown.clone()));
    }
}
