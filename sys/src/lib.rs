//! The kernel ABI that [lunbd](https://docs.rs/lunbd) uses and that no crate
//! offers, with the only `unsafe` code of the project.
//!
//! Each function is one system call: safe arguments in, an owned result out, the errno
//! unchanged. The layers above decide what a call means.

pub mod block;
pub mod directory;
pub mod dm;
pub mod files;
pub mod iscsi;
pub mod loop_device;
pub mod namespace;
pub mod nbd;
pub mod process;
pub mod sg;
pub mod socket;
pub mod stat;
