//! Removes one map.

use super::map::Map;
use crate::deadline::{Backoff, Deadline};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::{Roots, dm, worker};
use crate::uevent::Watch;

/// Removes the map and returns when sysfs no longer shows it; its disks stay. A map that is
/// gone already is a success. `watch` must be on the map's kernel name, `dm-N`.
///
/// The kernel refuses while the map is open: in a mount, a device stacked on it, a process,
/// the caller's own file, or for a moment udev's probe. The removal writes nothing back:
/// flush the map before. I/O that waits for a path would block the removal for ever: see
/// [`fail_if_no_path`](super::fail_if_no_path). Needs `CAP_SYS_ADMIN`.
///
/// After a timeout the kernel may still be removing it.
///
/// # Errors
/// `InUse`, and the map stays; `NotPermitted`; `TimedOut` at stage
/// `remove_map`.
pub fn remove(roots: &Roots, map: &Map, watch: &mut Watch, deadline: Deadline) -> Result<()> {
    // The uevent of the removal comes before the directory goes, so the loop also polls.
    let mut pauses = Backoff::for_kernel_state();
    let mut refusal = request_removal(roots, map, deadline)?;
    while map.is_there() {
        if deadline.has_passed() {
            let what = format!("{map} to be gone from sysfs");
            let error = Error::timed_out(Stage::RemoveMap, deadline, &what);
            let refusal = refusal.map_or_else(String::new, |refusal| format!("; {refusal}"));
            return Err(error.with_last_seen(map.describe() + &refusal));
        }
        let limit = deadline.at_most(pauses.pause());
        // Whatever comes, sysfs is read again.
        drop(watch.next(limit));
        if refusal.is_some() && map.is_there() && !deadline.has_passed() {
            refusal = request_removal(roots, map, deadline)?;
        }
    }
    Ok(())
}

/// Asks the kernel to remove the map. Returns its refusal if another process removes the
/// map or the kernel does not know it: sysfs then decides.
fn request_removal(roots: &Roots, map: &Map, deadline: Deadline) -> Result<Option<Error>> {
    let (own_map, own_roots) = (map.clone(), roots.clone());
    let removed = worker::run(
        Stage::RemoveMap,
        &format!("the kernel to remove {map}"),
        deadline,
        || map.describe(),
        move || remove_now(&own_roots, &own_map),
    );
    match removed {
        Err(error) if error.kind() == ErrorKind::Vanished => {
            tracing::debug!(%map, %error, "the kernel did not remove the map");
            Ok(Some(error))
        }
        result => result.map(|()| None),
    }
}

fn remove_now(roots: &Roots, map: &Map) -> Result<()> {
    map.require()?;
    let status = dm::status(roots, map.uuid())?;
    if status.devno != map.disk().devno() {
        let message = format!("{map} went away, and another has its uuid");
        return Err(Error::new(ErrorKind::Vanished, message));
    }
    dm::remove(roots, map.uuid()).map_err(|error| {
        if error.kind() != ErrorKind::InUse {
            return error;
        }
        let count = dm::status(roots, map.uuid()).map_or(status.open_count, |now| now.open_count);
        let message = format!("{map} is in use: it is open {count} times");
        Error::new(ErrorKind::InUse, message).caused_by(error)
    })
}
