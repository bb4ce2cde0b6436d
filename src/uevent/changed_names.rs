//! The names of the devices of one kind that had events.

use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::Mutex;

/// The component of a device path that names a device of the kind; `None` if the
/// path is of another kind.
pub(crate) type Naming = fn(&str) -> Option<&str>;

/// More names than this between two questions would cost more than a new index.
pub(super) const MAX_NAMES: usize = 1024;

/// The answer to a question.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Changed {
    /// Only these devices had an event. This includes every event that the kernel
    /// had sent before the question.
    These(BTreeSet<String>),
    /// Events are lost, so any device may have changed.
    Unknown,
}

/// The names that a subscription has recorded, shared by the hub's thread and the
/// caller.
#[derive(Debug)]
pub(crate) struct ChangedNames {
    naming: Naming,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    names: BTreeSet<String>,
    lost: bool,
}

impl ChangedNames {
    pub(super) fn new(naming: Naming) -> Arc<Self> {
        Arc::new(Self {
            naming,
            inner: Mutex::default(),
        })
    }

    pub(crate) fn event(&self, devpath: &str) {
        let Some(name) = (self.naming)(devpath) else {
            return;
        };
        let mut inner = self.inner.lock();
        if inner.names.len() >= MAX_NAMES && !inner.names.contains(name) {
            inner.lost = true;
        } else if !inner.names.contains(name) {
            inner.names.insert(name.to_owned());
        }
    }

    pub(crate) fn mark_lost(&self) {
        self.inner.lock().lost = true;
    }

    pub(super) fn take(&self) -> Changed {
        let inner = std::mem::take(&mut *self.inner.lock());
        if inner.lost {
            Changed::Unknown
        } else {
            Changed::These(inner.names)
        }
    }
}
