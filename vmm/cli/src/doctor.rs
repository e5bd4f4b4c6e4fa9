//! The doctor.
use crate::{args::DoctorArgs, failure::Failure};
/// x
pub fn main(_: &DoctorArgs) -> Result<(), Failure> {
    Ok(())
}
