//! What can be done, one effect a file. An actuator does one thing to one window or slot and looks whether it
//! happened; it decides nothing. `clear` does it to all RAM of a guest that stands still. `giant` keeps the pool pages it put behind guest RAM, `swap` some
//! huge pages that are ready; none keeps state of the guest.

pub mod clear;
pub mod collapse;
mod dirty;
pub mod giant;
pub mod give_back;
pub mod hold;
pub mod prefault;
pub mod release;
mod reshape;
pub mod split;
pub mod swap;
