//! Generic netlink: one request to a family of the kernel and its answers, on a
//! socket of its own.
//!
//! The kernel runs a command inside `sendmsg(2)`, for most families under one
//! mutex (`net/netlink/genetlink.c`, `genl_mutex`). It resolves names under
//! that mutex too. So a command that hangs blocks every other, and no receive
//! timeout helps. Each call therefore runs on a [`worker`].

mod connection;
mod conversation;
mod family;
mod listener;

use crate::deadline::Deadline;
use crate::error::{Result, Stage};
use crate::kernel::worker;
use connection::Connection;
pub(crate) use conversation::Payload;
pub(crate) use listener::{Listener, Notification};

/// One command to a family.
pub(crate) struct Request {
    /// The family's name. The kernel assigns a new number at each load.
    pub(crate) family: &'static str,
    /// Command, version and attributes.
    pub(crate) payload: Payload,
    /// What lives until the kernel has returned, even after the caller gave up: the
    /// descriptors that the attributes name by number, which could mean another file by then,
    /// and the locks of what the command changes.
    pub(crate) held: Box<dyn Send>,
}

/// Sends `request`, and returns the kernel's answers once it has acknowledged
/// it.
///
/// After a timeout the kernel may still run or refuse the command, so the
/// caller must look at the object itself.
///
/// # Errors
/// By the kernel's errno, with the kernel's own text if it gave one;
/// `NotSupported` if the family does not exist; `TimedOut` at `stage`.
pub(crate) fn call(
    request: Request,
    stage: Stage,
    what: &str,
    deadline: Deadline,
    last_seen: impl FnOnce() -> String,
) -> Result<Vec<Payload>> {
    worker::run(stage, what, deadline, last_seen, move || {
        // Name all fields, so that the closure takes all of them and they live
        // as long.
        let Request {
            family,
            payload,
            held,
        } = request;
        let result = exchange(family, &payload);
        drop(held);
        result
    })
}

fn exchange(family: &'static str, payload: &Payload) -> Result<Vec<Payload>> {
    let mut connection = Connection::open()?;
    if let Some(id) = family::known(family) {
        match connection.exchange(id, payload) {
            // No family has this number because the module was loaded anew. The
            // kernel did nothing.
            Err(error) if error.errno() == Some(nix::libc::ENOENT) => {}
            result => return result,
        }
    }
    let id = family::resolve(&mut connection, family)?;
    connection.exchange(id, payload)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::error::ErrorKind;

    fn ask(family: &'static str) -> Result<Vec<Payload>> {
        let request = Request {
            family,
            payload: family::get_family("nlctrl"),
            held: Box::new(()),
        };
        let deadline = Deadline::after(Duration::from_secs(10));
        call(request, Stage::Resolve, "an answer", deadline, String::new)
    }

    #[test]
    fn the_controller_answers_about_itself_and_its_number_is_remembered() {
        for _ in 0..2 {
            let answers = ask("nlctrl").unwrap();
            assert_eq!(answers.len(), 1);
            assert_eq!(family::id_in(&answers[0]), Some(16));
        }
        assert_eq!(family::known("nlctrl"), Some(16));
    }

    #[test]
    fn a_number_that_no_family_has_any_more_is_resolved_again() {
        family::remember("lunbd-none", 0x3ff);
        let error = ask("lunbd-none").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotSupported);
        assert!(error.to_string().contains("lunbd-none"), "{error}");
        assert_eq!(family::known("lunbd-none"), None);
    }
}
