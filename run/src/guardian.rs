//! Host resources that another process gives back however this one ends.

pub mod cgroup;
pub mod giant_pages;
pub mod path;
