//! What can be done, one effect a file. An actuator does one thing to one window or slot and looks whether it
//! happened; it decides nothing. Only `giant` keeps something: the pool pages it put behind guest RAM.

pub mod collapse;
mod dirty;
pub mod giant;
pub mod hold;
pub mod prefault;
pub mod release;
pub mod split;
