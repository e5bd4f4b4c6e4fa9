//! What can be done, one effect a file. An actuator does one thing to one window or slot and looks whether it
//! happened; it keeps no state of the guest and decides nothing.

pub mod collapse;
pub mod hold;
pub mod prefault;
pub mod swap;
