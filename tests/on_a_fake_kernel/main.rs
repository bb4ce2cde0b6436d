//! The suites that run on the kernel of `tests/fake_kernel`.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods,
    reason = "a test panics to fail"
)]

mod access_states;
mod aliases;
#[cfg(feature = "journal")]
#[path = "../behaviour/mod.rs"]
mod behaviour;
#[cfg(feature = "journal")]
mod behaviours;
mod claim;
mod detach;
#[allow(dead_code, reason = "some suites need a feature")]
#[path = "../fake_kernel/mod.rs"]
mod fake_kernel;
#[cfg(feature = "journal")]
mod reap;
mod unmapped;
