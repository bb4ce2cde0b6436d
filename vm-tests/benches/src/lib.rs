//! `lunbd` timed beside what is used today, and shown: in the VM that `vm-tests`
//! boots.
//!
//! `vm-tests/bench` and `vm-tests/demo` start `host`. It has the lab boot a machine
//! for `compare` or for `story`, and draws what they leave.

pub mod figures;
pub mod story;
