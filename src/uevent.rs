//! Kernel and udev events: subscribe, act, and wait for the cause.
//!
//! The kernel announces a device when it exists (netlink group 1); udevd
//! announces it again when its rules have run and its links stand (group 2).
//! One [`Hub`] thread reads both for all waiters. A waiter holds a [`Watch`]
//! on one component of a device path, takes it **before** it acts, and can
//! then not miss the answer: what a full socket buffer loses comes back as
//! [`Notice::Resync`], which means "look at sysfs again".
//!
//! Ten thousand may wait: one costs less than 1 KiB, an event costs no more when
//! others wait for something else, and only a full socket buffer makes work for
//! each of them, once until it has read that. [`Hub::counters`] tells how it went.
//!
//! What arrays report by themselves (their logical units have changed, a
//! capacity has) comes to a [`UnitAttentionWatch`]. Nothing is scanned for that.

mod changes;
mod counters;
mod deaf;
mod dispatch;
mod event;
mod hub;
mod kernel_reader;
mod mark;
mod message;
mod mode;
mod noted;
mod queue;
mod settle;
mod socket;
mod stream;
mod subscription;
mod unit_attention;
mod unit_attention_watch;
mod watch;

pub(crate) use changes::Changes;
pub use counters::Counters;
pub(crate) use deaf::{is_in_machines_network_namespace, why_deaf};
pub use event::{Event, Notice, Origin};
pub use hub::{Hub, HubOptions};
pub use message::{Malformed, Message};
pub use mode::Mode;
pub(crate) use noted::Changed;
#[cfg(test)]
pub(crate) use noted::Noted;
pub use settle::Settled;
pub(crate) use settle::{Leaving, Proof, devpath, settle, settle_again, settle_removal};
pub use stream::{Stream, Waker};
pub use unit_attention::UnitAttention;
pub use unit_attention_watch::{UnitAttentionEvent, UnitAttentionWatch};
pub use watch::Watch;
