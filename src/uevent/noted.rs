//! The names of the devices of one kind that had events.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Which component of a device path names a device of the kind; `None` where the
/// path is of another kind.
pub(crate) type Naming = fn(&str) -> Option<&str>;

/// More names than this between two questions cost more than a new index.
pub(super) const MOST_NAMES: usize = 1024;

/// The answer to a question.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Changed {
    /// These devices had an event, and no other one: every event that the kernel had
    /// sent before the question is taken into account.
    These(BTreeSet<String>),
    /// Events are lost, or none come: any device may have changed.
    Unknown,
}

/// What a subscription has noted, which the hub's thread and those who ask share.
#[derive(Debug)]
pub(crate) struct Noted {
    naming: Naming,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    names: BTreeSet<String>,
    lost: bool,
}

impl Noted {
    pub(super) fn new(naming: Naming) -> Arc<Self> {
        Arc::new(Self {
            naming,
            inner: Mutex::default(),
        })
    }

    /// Takes in an event of this device path.
    pub(crate) fn event(&self, devpath: &str) {
        let Some(name) = (self.naming)(devpath) else {
            return;
        };
        let mut inner = self.lock();
        if inner.names.len() >= MOST_NAMES && !inner.names.contains(name) {
            inner.lost = true;
        } else if !inner.names.contains(name) {
            inner.names.insert(name.to_owned());
        }
    }

    /// Takes in that events are lost.
    pub(crate) fn lose(&self) {
        self.lock().lost = true;
    }

    pub(super) fn take(&self) -> Changed {
        let inner = std::mem::take(&mut *self.lock());
        if inner.lost {
            Changed::Unknown
        } else {
            Changed::These(inner.names)
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // No code under this lock can leave it half changed.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
