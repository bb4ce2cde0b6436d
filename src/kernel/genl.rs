//! Generic netlink: one request to a family of the kernel's and its answers,
//! on a socket of its own.
//!
//! The kernel does the work of a command inside `sendmsg(2)` and under one
//! mutex for most families (`net/netlink/genetlink.c`, `genl_mutex`), the
//! resolution of names included: a command that hangs, hangs those of others,
//! and no receive timeout helps. So each runs on a [`worker`].

mod connection;
mod conversation;
mod family;
mod listener;

use std::os::fd::OwnedFd;

use crate::deadline::Deadline;
use crate::error::{Result, Stage};
use crate::kernel::worker;
use connection::Connection;
pub(crate) use conversation::Payload;
pub(crate) use listener::{Listener, Notification};

/// One command to a family.
#[derive(Debug)]
pub(crate) struct Request {
    /// The family's name; the kernel gives its number anew at each load.
    pub(crate) family: &'static str,
    /// Command, version and attributes.
    pub(crate) payload: Payload,
    /// The descriptors that the attributes name by number. They stay open
    /// until the kernel has returned, also when the caller no longer waits:
    /// else a number could by then be another file's.
    pub(crate) keep_open: Vec<OwnedFd>,
}

/// Sends `request` and returns the kernel's answers once it has acknowledged
/// it.
///
/// After a timeout the command may still be done or refused: what it is about
/// has to be looked at.
///
/// # Errors
/// By the kernel's errno, with its own words where it gave some;
/// `NotSupported` where the family does not exist; `TimedOut` at `stage`.
pub(crate) fn call(
    request: Request,
    stage: Stage,
    what: &str,
    deadline: Deadline,
    last_seen: impl FnOnce() -> String,
) -> Result<Vec<Payload>> {
    worker::run(stage, what, deadline, last_seen, move || {
        // Named, so that all of it moves to this thread and lasts as long.
        let Request {
            family,
            payload,
            keep_open,
        } = request;
        let result = exchange(family, &payload);
        drop(keep_open);
        result
    })
}

fn exchange(family: &'static str, payload: &Payload) -> Result<Vec<Payload>> {
    let mut connection = Connection::open()?;
    if let Some(id) = family::known(family) {
        match connection.exchange(id, payload) {
            // No family has this number: the module was loaded anew, and
            // nothing was done.
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
            keep_open: Vec::new(),
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
