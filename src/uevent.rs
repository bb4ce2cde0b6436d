//! Kernel and udev events: subscribe, act, and wait for the cause.
//!
//! The kernel announces a device when it exists (netlink group 1); udevd
//! announces it again when its rules have run and its links stand (group 2).
//! One [`Hub`] thread reads both for all waiters. A waiter holds a [`Watch`]
//! on one component of a device path, takes it **before** it acts, and can
//! then not miss the answer: what a full socket buffer loses comes back as
//! [`Notice::Resync`], which means "look at sysfs again".

mod dispatch;
mod event;
mod hub;
mod message;
mod mode;
mod settle;
mod socket;
mod watch;

pub use dispatch::Counters;
pub use event::{Event, Origin};
pub use hub::{Hub, HubOptions};
pub use message::{Malformed, Message};
pub use mode::Mode;
pub use settle::Settled;
pub(crate) use settle::{Proof, devpath, settle, settle_again, settle_removal};
pub use watch::{Notice, Watch};
