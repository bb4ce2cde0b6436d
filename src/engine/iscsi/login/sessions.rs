//! The sessions of one attach.

use std::collections::BTreeMap;

use crate::deadline::Deadline;
use crate::engine::iscsi::login::new_session::NewSession;
use crate::engine::iscsi::sessions::{end_if_unused, end_unused_best_effort};
use crate::engine::lock::device_lock::DeviceLock;
use crate::error::Error;
use crate::iscsi::{IscsiSession, SessionName};
use crate::kernel::Roots;

/// The sessions of one attach, and the locks that keep them from being ended.
#[derive(Debug, Default)]
pub(in crate::engine) struct Sessions {
    pub(super) shared_locks: Vec<DeviceLock>,
    /// lunbd's sessions that the attach shares, no matter which process made them.
    pub(super) used: Vec<IscsiSession>,
    pub(super) new: Vec<NewSession>,
    /// Why there is no session of this name.
    pub(super) failures: BTreeMap<SessionName, Error>,
}

impl Sessions {
    pub(in crate::engine) fn commit(self) {
        for session in self.new {
            session.keep();
        }
    }

    /// Ends the sessions of a failed attach, unless another process uses them by now, and
    /// those that another attach left to this one while it shared them: of several
    /// attaches that fail, the last one ends the session.
    pub(in crate::engine) fn rollback(self, roots: &Roots, deadline: Deadline) {
        drop(self.shared_locks);
        let is_new = |used: &IscsiSession| self.new.iter().any(|new| new.session == *used);
        for session in self.used.iter().filter(|used| !is_new(used)) {
            end_unused_best_effort(roots, session, deadline);
        }
        if deadline.has_passed() {
            // Dropping each session ends it on a thread for which no caller waits.
            return drop(self.new);
        }
        for session in self.new {
            let session = session.keep();
            if let Err(error) = end_if_unused(roots, &session, deadline) {
                tracing::warn!(session = %session.id(), %error, "lunbd could not end a session");
            }
        }
    }
}
