//! Changes to guest memory, one effect in each file. An actuator does one thing to one window or slot, checks whether
//! it happened, and decides nothing. `clear` acts on all RAM of a stopped guest. `giant` keeps the pool pages that it
//! put behind guest RAM, and `swap` and `vacate` keep some huge pages ready; no actuator keeps state of the guest.

pub mod clear;
pub mod collapse;
mod dirty;
pub mod giant;
pub mod give_back;
pub mod hold;
pub mod move_to_node;
pub mod prefault;
pub mod release;
mod reshape;
pub mod split;
pub mod swap;
pub mod unmapped_collapse;
pub mod vacate;
mod vacated_pages;
