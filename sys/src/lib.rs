//! The kernel ABI that [lunbd](https://docs.rs/lunbd) speaks and that no crate
//! offers, and the only `unsafe` of the project.
//!
//! Each function is one system call: safe arguments in, an owned result out,
//! the errno untouched. What a call means is for the floors above.

pub mod block;
pub mod dm;
pub mod files;
pub mod iscsi;
pub mod loop_device;
pub mod nbd;
pub mod process;
pub mod sg;
pub mod socket;
pub mod stat;
