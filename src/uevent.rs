//! Kernel and udev events: subscribe, act, and wait for the resulting event.
//!
//! The kernel announces a device when it exists (netlink group 1). udevd announces it again
//! when its rules have run and its links exist (group 2). One [`Hub`] thread reads both
//! for all waiters. A waiter takes a [`Watch`] on one component of a device path
//! **before** it acts, so it cannot miss the event. If a full socket buffer loses events,
//! the waiter gets [`Notice::Resync`], which means "look at sysfs again".
//!
//! Ten thousand waiters may wait. A waiter costs less than 1 KiB. The cost of an event does
//! not depend on waiters for other events. Only a full socket buffer causes work for every
//! waiter, once until the waiter has read its notice. [`Hub::counters`] reports statistics.
//!
//! A [`UnitAttentionWatch`] delivers what arrays report on their own, such as changed
//! logical units or a changed capacity. lunbd scans nothing for that.

mod changed_names;
mod changes;
mod counters;
mod dispatch;
mod event;
mod hub;
mod kernel_reader;
mod mark;
mod message;
mod mode;
mod queue;
mod removal;
mod settle;
mod socket;
mod stream;
mod subscription;
mod udev_reachability;
mod unit_attention;
mod unit_attention_watch;
mod watch;

pub(crate) use changed_names::Changed;
#[cfg(test)]
pub(crate) use changed_names::ChangedNames;
pub(crate) use changes::Changes;
pub use counters::Counters;
pub use event::{Event, Notice, Origin};
pub use hub::{Hub, HubOptions};
pub use message::{Malformed, Message};
pub use mode::Mode;
pub(crate) use removal::{RemovedDevice, settle_removal};
pub use settle::Settled;
pub(crate) use settle::{SettledDevice, devpath, settle, settle_again};
pub use stream::{Stream, Waker};
pub(crate) use udev_reachability::{is_in_machines_network_namespace, udev_unreachable_reason};
pub use unit_attention::UnitAttention;
pub use unit_attention_watch::{UnitAttentionEvent, UnitAttentionWatch};
pub use watch::Watch;
