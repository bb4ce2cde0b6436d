//! Decides what happens to I/O that has no path.

use super::map::Map;
use super::status::read_status;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::{Roots, dm, worker};

/// Makes I/O without a path fail, including I/O that already waits. A map that queues
/// without a path blocks its own flush and removal for ever. If multipathd runs, call
/// [`Daemon::disable_queueing`](super::Daemon::disable_queueing) as well, or it turns
/// queueing on again when a path comes back.
///
/// The kernel no longer has the feature when this returns. Needs `CAP_SYS_ADMIN`. After a
/// timeout the kernel may still do it.
///
/// # Errors
/// `Vanished` if this instance of the map is over; `NotReady` while the map is suspended, or if
/// another process turned queueing on again; `NotPermitted`; `TimedOut` at stage `map`.
pub fn fail_if_no_path(roots: &Roots, map: &Map, deadline: Deadline) -> Result<()> {
    let (own_map, roots) = (map.clone(), roots.clone());
    worker::run(
        Stage::Map,
        &format!("{map} to fail I/O that has no path"),
        deadline,
        || map.describe(),
        move || {
            own_map.require()?;
            dm::send_message(&roots, own_map.uuid(), "fail_if_no_path")
                .map_err(|error| explain(error, &own_map))?;
            if read_status(&roots, &own_map)?.queues {
                let message =
                    format!("{own_map} was told not to queue and queues: somebody else told it to");
                return Err(Error::new(ErrorKind::NotReady, message));
            }
            Ok(())
        },
    )
}

/// The kernel answers `EBUSY` while the map is suspended (`dm-mpath.c`,
/// `multipath_message`).
fn explain(error: Error, map: &Map) -> Error {
    if error.kind() != ErrorKind::InUse {
        return error;
    }
    let message = format!("{map} is suspended and takes no message");
    Error::new(ErrorKind::NotReady, message).caused_by(error)
}
