//! Kernel calls that were given up and have not returned. Each holds a thread, so none is
//! begun a second time.

use std::collections::BTreeMap;
use std::time::Duration;

use parking_lot::Mutex;

use super::worker::Pending;
use crate::deadline::Deadline;
use crate::error::Result;

/// The calls of one kind, by the name of what each looks at.
pub(crate) struct GivenUp<T>(Mutex<BTreeMap<String, Pending<T>>>);

impl<T> GivenUp<T> {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    /// Whether the last call of this name was given up and has not returned.
    pub(crate) fn has(&self, name: &str) -> bool {
        let now = Deadline::after(Duration::ZERO);
        let mut calls = self.0.lock();
        let is_pending = calls
            .get(name)
            .is_some_and(|earlier| earlier.wait(now).is_none());
        if !is_pending {
            calls.remove(name);
        }
        is_pending
    }

    /// The result of a call; `None` where it has not returned by `deadline`, and is given up.
    pub(crate) fn wait(
        &self,
        name: String,
        call: Pending<T>,
        deadline: Deadline,
    ) -> Option<Result<T>> {
        let result = call.wait(deadline);
        if result.is_none() {
            tracing::warn!(name, "the kernel has not returned; its thread stays");
            self.0.lock().insert(name, call);
        }
        result
    }
}
