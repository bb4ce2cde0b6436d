//! The addresses to which the sources of a SCSI unit lead, and their locks.

use std::collections::BTreeSet;

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::lock::device_lock::DeviceLock;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{Hctl, Source};
use crate::scsi;
use crate::transport::{self, Route};

/// The routes to which the sources lead on this machine.
pub(in crate::engine) fn routes_to<'a>(
    engine: &Engine,
    sources: impl Iterator<Item = &'a Source>,
) -> Result<Vec<Route>> {
    let roots = engine.roots();
    let mut routes = Vec::new();
    for source in sources {
        match source {
            Source::Scsi(hctl) => {
                scsi::require_host(roots, hctl.host)?;
                routes.push(Route::by_address(*hctl));
            }
            Source::Iscsi(uri) => routes.extend(transport::iscsi_routes(roots, uri)?),
            Source::Fc(uri) => routes.extend(transport::fc_routes(roots, uri)?),
            Source::Nbd(uri) => {
                let message = format!("{uri} is no path of a SCSI unit");
                return Err(Error::new(ErrorKind::InvalidInput, message).at(Stage::Resolve));
            }
        }
    }
    Ok(routes)
}

/// Locks the addresses in ascending order, so that callers cannot deadlock.
pub(in crate::engine) fn lock_addresses(
    engine: &Engine,
    addresses: BTreeSet<Hctl>,
    deadline: Deadline,
) -> Result<Vec<DeviceLock>> {
    let take = |hctl| DeviceLock::take(engine.roots(), &format!("scsi-{hctl}"), deadline);
    addresses.into_iter().map(take).collect()
}

/// Whether the kernel scans one of these addresses for a lunbd process, even a killed
/// one: its devices appear at the scan's end.
pub(in crate::engine) fn are_scanned(engine: &Engine, addresses: &BTreeSet<Hctl>) -> Result<bool> {
    for &hctl in addresses {
        if DeviceLock::is_held(engine.roots(), &DeviceLock::of_scan(hctl))? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Waits until the kernel scans none of these addresses for lunbd.
///
/// # Errors
/// `TimedOut` at stage `lock`, naming the process of the scan.
pub(in crate::engine) fn wait_for_scans(
    engine: &Engine,
    addresses: &BTreeSet<Hctl>,
    deadline: Deadline,
) -> Result<()> {
    let wait = |&hctl| DeviceLock::wait(engine.roots(), &DeviceLock::of_scan(hctl), deadline);
    addresses.iter().try_for_each(wait)
}
