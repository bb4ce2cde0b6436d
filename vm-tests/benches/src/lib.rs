//! Times `lunbd` beside what is used today, and shows it, in the VM that `vm-tests` boots.
//!
//! `vm-tests/bench` and `vm-tests/demo` start `host`. It has the lab boot a machine for
//! `compare` or for `story`, and draws their results.

pub mod figures;
pub mod story;
