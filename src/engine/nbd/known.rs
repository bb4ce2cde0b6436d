//! The known facts of a connected NBD device: its source, its TLS, and whether it answers.

use std::collections::BTreeMap;
use std::time::Duration;

use parking_lot::MutexGuard;

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{BackendId, NbdIndex, NbdUri};
use crate::kernel::blockdev::BlockDevice;
use crate::nbd::{self, Link, NbdDevice, TlsInfo};

/// Requires that neither this process nor an id that is a URI shows another source of the
/// device than `uri`.
pub(in crate::engine) fn require_source(
    engine: &Engine,
    device: &NbdDevice,
    uri: &NbdUri,
    backend: &BackendId,
) -> Result<()> {
    let index = device.index();
    let source = known_source(engine, device, backend);
    let Some(other) = source.filter(|source| source != uri) else {
        return Ok(());
    };
    let message = format!(
        "backend id {backend} is attached as nbd{index} from {other}, not from {uri}: detach \
         it first, or give this source another id"
    );
    Err(Error::new(ErrorKind::InUse, message).at(Stage::Connect))
}

/// Requires that the device is not known to use TLS if `uri` does not.
pub(in crate::engine) fn refuse_tls_downgrade(
    engine: &Engine,
    device: &NbdDevice,
    uri: &NbdUri,
    backend: &BackendId,
) -> Result<()> {
    let source = known_source(engine, device, backend);
    let Some(known) = source.filter(|source| source.uses_tls() && !uri.uses_tls()) else {
        return Ok(());
    };
    let message = format!(
        "backend id {backend} is attached as nbd{} over TLS from {known}, and {uri} is without \
         TLS: detach it first",
        device.index()
    );
    Err(Error::new(ErrorKind::InUse, message).at(Stage::Resolve))
}

/// The source of a device, from this process's connections or from an id that is a URI.
pub(in crate::engine) fn known_source(
    engine: &Engine,
    device: &NbdDevice,
    backend: &BackendId,
) -> Option<NbdUri> {
    let is_its_own = |link: &&Link| link.backend == *backend;
    let links = current_links(engine, device);
    match links.get(&device.index()).filter(is_its_own) {
        Some(link) => Some(link.uri.clone()),
        None => backend.as_str().parse().ok(),
    }
}

/// The TLS of the device's last connection: that of this process, or the recorded one if
/// this process has made none. It is not known if another process has since replaced the
/// connections of this one.
pub(in crate::engine) fn known_tls(
    engine: &Engine,
    device: &NbdDevice,
    backend: &BackendId,
    recorded: Option<&TlsInfo>,
) -> Option<TlsInfo> {
    let links = current_links(engine, device);
    match links.get(&device.index()) {
        Some(link) if link.backend != *backend => recorded.cloned(),
        Some(link) if link.is_of_another_now() => None,
        Some(Link { tls: Some(tls), .. }) => Some(tls.clone()),
        _ => recorded.cloned(),
    }
}

/// Reads the bytes that hold the names of the device's content, which proves that the
/// device answers.
///
/// # Errors
/// `NotReady` once this process's connections have ended, and `TimedOut`.
pub(in crate::engine) fn require_answer(
    engine: &Engine,
    device: &NbdDevice,
    backend: &BackendId,
    deadline: Deadline,
) -> Result<Vec<u8>> {
    /// How long the call waits for the read before it looks at the connections again. It waits
    /// as long after they have ended, because another process may have given the device new
    /// ones.
    const LOOK_INTERVAL: Duration = Duration::from_secs(1);
    let length = usize::try_from(nbd::CONTENT_LENGTH).unwrap_or(usize::MAX);
    let first_bytes = move |disk: &_, roots: &_| BlockDevice::read_first_bytes(disk, roots, length);
    let mut read = None;
    loop {
        let had_ended = connections_have_ended(engine, device, backend);
        let limit = deadline.at_most(LOOK_INTERVAL);
        if read.is_none() {
            let (reads, roots) = (&engine.nbd_reads, engine.roots());
            read = reads.start(device, roots, limit, first_bytes)?;
        }
        if let Some(answer) = read.as_ref().and_then(|read| read.wait(limit)) {
            return answer;
        }
        if !had_ended && !deadline.has_passed() {
            continue;
        }
        let error = if had_ended || connections_have_ended(engine, device, backend) {
            have_ended_error(device)
        } else {
            let what = format!(
                "a read of nbd{}, which is attached already: its connections may be dead, and a \
                 heal replaces those",
                device.index()
            );
            Error::timed_out(Stage::Probe, deadline, &what)
        };
        let earlier = if read.is_none() {
            "an earlier read has not returned, "
        } else {
            ""
        };
        let seen = format!("{earlier}{}", device.disk().describe());
        return Err(error.with_last_seen(seen));
    }
}

/// Whether all connections of the device were those of this process, and have ended.
fn connections_have_ended(engine: &Engine, device: &NbdDevice, backend: &BackendId) -> bool {
    let ended = |link: &Link| link.backend == *backend && link.is_dead();
    let links = current_links(engine, device);
    links.get(&device.index()).is_some_and(ended)
}

fn have_ended_error(device: &NbdDevice) -> Error {
    let message = format!(
        "nbd{} is attached, and its connections have ended: heal it, or detach it",
        device.index()
    );
    Error::new(ErrorKind::NotReady, message).at(Stage::Probe)
}

/// The links without that of an earlier device with this number: another process may
/// have detached it and connected another export under the same id.
pub(in crate::engine) fn current_links<'a>(
    engine: &'a Engine,
    device: &NbdDevice,
) -> MutexGuard<'a, BTreeMap<NbdIndex, Link>> {
    let now = device.pid().ok().flatten();
    let mut links = engine.links.lock();
    let is_earlier = |link: &Link| link.is_of_an_earlier_device(now);
    if links.get(&device.index()).is_some_and(is_earlier) {
        links.remove(&device.index());
    }
    links
}

/// Changes this process's link of the device, or only looks at it; `None` if there is none.
pub(in crate::engine) fn change_own_link<T>(
    engine: &Engine,
    device: &NbdDevice,
    backend: &BackendId,
    change: impl FnOnce(&mut Link) -> T,
) -> Option<T> {
    let mut links = current_links(engine, device);
    let link = links.get_mut(&device.index());
    link.filter(|link| link.backend == *backend).map(change)
}
