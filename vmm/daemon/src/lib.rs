//! wideleafd: looks after the guests of a host.
