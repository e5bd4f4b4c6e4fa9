//! What a guest sees must be true: its contents, and how its memory is mapped. In one program.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod contents_survive;
mod disk;
mod fault_price;
mod first_touch_giants;
mod giant_swap;
mod giants_chosen;
mod mapping_level_observed;
mod minor_faults;
mod moved_windows;
mod numa;
mod pattern_guest;
mod reserved_frames;
mod sensors_and_actuators;
mod slow_disk;
