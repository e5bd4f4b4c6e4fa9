//! Made-up speeds of restored guests.

use crate::disturbance::WATCHED_S;
use crate::restoring::FIRST_PROGRESS_S;
use crate::results::{Measured, Sample};

/// Time of a guest's first mark, in seconds.
const FIRST_MARK_S: f64 = 0.01;

/// Has the guest of a run, watched for `watched_s`, come to full speed at this time, in seconds, or never.
pub(super) fn come_to_full_speed(measured: &mut Measured, watched_s: f64, at_s: Option<f64>) {
    measured.told.extend([(WATCHED_S, watched_s), (FIRST_PROGRESS_S, FIRST_MARK_S)].map(|(n, s)| (n.to_owned(), s)));
    let interval = |at_s, rate: f64| Sample { at_s, rate_per_s: Some(rate), ..Sample::default() };
    let Some(full_from_s) = at_s else { return };
    measured.series = [interval(full_from_s, 1.0)].into();
    let step_s = (watched_s - full_from_s) / 100.0;
    measured.series.extend((1..=100).map(|step| interval(full_from_s + step_s * f64::from(step), 100.0)));
}
