//! The scan of one path's address.

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::attach::AttachRequest;
use crate::engine::attach::addresses::routes_to;
use crate::engine::lock::device_lock::DeviceLock;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::Hctl;
use crate::scsi::{self, ScsiDevice};
use crate::transport::RouteKind;

/// Scans one address, and holds its scan lock until the kernel's scan ends.
pub(super) fn scan_address(
    engine: &Engine,
    hctl: Hctl,
    via: &RouteKind,
    request: &AttachRequest,
    deadline: Deadline,
) -> Result<ScsiDevice> {
    let roots = engine.roots();
    let under_way = DeviceLock::of_scan(hctl);
    let own = roots.clone();
    let held = move || {
        let lock = DeviceLock::share(&own, &under_way, deadline)?;
        if deadline.has_passed() {
            // The caller may have gone, and other processes have seen no scan lock.
            let what = format!("{under_way} to begin");
            return Err(Error::timed_out(Stage::Scan, deadline, &what));
        }
        Ok(lock)
    };
    scsi::scan(roots, &engine.scheduler, hctl, held, deadline)
        .map_err(|error| explain_empty_scan(engine, error, via, hctl, request))
}

/// Explains why a scan brought no device. The kernel scans nothing and reports nothing
/// where the session is not logged in or the port is not online
/// (`iscsi_user_scan_session`, `fc_user_scan_tgt`). So an empty scan describes the LUN
/// only where the path is still up after it.
fn explain_empty_scan(
    engine: &Engine,
    error: Error,
    via: &RouteKind,
    hctl: Hctl,
    request: &AttachRequest,
) -> Error {
    if !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotReady) {
        return error;
    }
    let routes = match routes_to(engine, request.sources()) {
        Ok(routes) => routes,
        Err(error) => return error.at(Stage::Scan),
    };
    let mut why = format!("{via} no longer leads to {hctl}");
    for route in routes {
        match route.address {
            Ok(place) if place == hctl => return error,
            Err(missing) if route.via == *via => why = missing.to_string(),
            _ => {}
        }
    }
    Error::new(ErrorKind::TooFewPaths, why).at(Stage::Scan)
}
