//! The public call of a detach; [`scsi`] and [`nbd`] hold the steps for each kind of device.

pub(super) mod detachment;
mod flush_paths;
mod map_users;
mod nbd;
mod open_paths;
mod other_unit;
mod queueing_map;
pub(super) mod receipt;
pub(super) mod remove_device;
pub(super) mod remove_map;
pub(super) mod remove_paths;
pub(super) mod request;
pub(super) mod resolve;
mod run;
pub(super) mod scsi;
mod transient;
mod wait;

use std::collections::BTreeSet;

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::call::CallContext;
use crate::engine::detach::nbd::{detach_nbd_backend, detach_nbd_device};
use crate::engine::detach::receipt::DetachFailure;
use crate::engine::detach::resolve::{Resolved, ResolvedUnit, addresses_of, resolve_target};
use crate::engine::detach::scsi::detach_scsi;
use crate::engine::iscsi::sessions::{
    end_unused_sessions, has_own_session, hosts_of_unfinished_logouts,
};
use crate::engine::telemetry::{self, Call};
use crate::error::{Error, Result, Stage};
use crate::id::{SessionId, Source};
pub use detachment::{Detachment, Place};
pub use request::{DetachRequest, DetachTarget};

impl Engine {
    /// Detaches one device. The call proves that nothing uses the device: it claims it exclusively
    /// and looks for the users that a claim does not exclude (processes that have it open for
    /// writing, loop devices, targets of the kernel). It then writes back the device's pages and
    /// its cache, and removes it. A device that is not there is detached already: `changed: false`.
    /// A process that only reads does not keep a disk; a map is kept by any process that has it
    /// open.
    ///
    /// **SCSI**: removes the multipath map of the unit and then all its paths, found by the unit's
    /// identity at that moment, also those that appear late. Where no name of the unit is
    /// [unique](crate::id::Wwid::is_unique), its paths are those that the caller named and those
    /// that lead to the same LUN of the same iSCSI target or Fibre Channel port; the call leaves
    /// another device with the same names alone, and the receipt names it. The order loses no data:
    /// claim and flush the map, remove it, claim and flush each path, delete each; a failed flush
    /// stops the deletes. The call then waits for scans of this machine that still run at its
    /// source's addresses, even those of a killed process, and removes what they bring. It returns
    /// when sysfs shows none of the devices, udev has handled their removal and multipathd has
    /// forgotten them. Linux 5.10 or later; needs write access to the devices' `delete` attribute
    /// (root) and `CAP_SYS_ADMIN`.
    ///
    /// **NBD**: disconnects, and returns when the device is free: no `pid`, no size, nothing in
    /// flight, no holder. A source is found by its backend id, so that the call never touches a
    /// device of another client; a node names its device whatever the backend id.
    ///
    /// A refused detach leaves the device as it was. After a timeout at stage `delete`,
    /// `disconnect` or `confirm` the kernel goes on by itself; at stage `settle` the device is gone
    /// and udev has not handled that yet. A repeated detach is safe. The call retries transient
    /// failures until the deadline.
    ///
    /// # Errors
    /// Each comes with the receipt of what was done. `InUse`, which names the users; `NotFound`
    /// where a path leads nowhere (which does not prove that the disk is gone: name the source or
    /// the unit); `IdentityMismatch` where another unit is there than the expected one;
    /// `InvalidInput` for a partition; `NotSupported` for a disk that is neither SCSI nor NBD, and
    /// before Linux 5.14 for an NBD source while any NBD device is connected: name the node; `Io`
    /// where a flush failed, and then that disk stays, and its map may be gone; `NotReady` where
    /// the table of a multipath map has no path, and then the map stays; `NotPermitted`;
    /// `TimedOut` at the stage that it names.
    #[tracing::instrument(skip_all, fields(target, node))]
    pub fn detach(
        &self,
        request: impl Into<DetachRequest>,
        deadline: Deadline,
    ) -> Result<Detachment, DetachFailure> {
        let request = request.into();
        tracing::Span::current().record("target", request.target.to_string());
        telemetry::measured(Call::Detach, || detach_timed(self, &request, deadline))
    }
}

fn detach_timed(
    engine: &Engine,
    request: &DetachRequest,
    deadline: Deadline,
) -> Result<Detachment, DetachFailure> {
    let mut call = CallContext::new(Call::Detach, request.observer.as_ref(), deadline);
    call.enter(Stage::Resolve);
    let backend = request.backend.clone();
    let mut detachment = match resolve_target(engine, &request.target, backend, deadline)? {
        Resolved::Scsi(mut resolved) => {
            for source in &request.more {
                resolved.addresses.extend(addresses_of(engine, source)?);
            }
            let done = detach_scsi(engine, &resolved, request, &mut call)?;
            end_sessions(engine, done, &resolved, request, &mut call)?
        }
        Resolved::NbdBackend(id) => detach_nbd_backend(engine, id, request, &mut call)?,
        Resolved::Nbd(device) => detach_nbd_device(engine, &device, request, &mut call)?,
    };
    detachment.phases = call.finish();
    if let Some(node) = &detachment.node {
        tracing::Span::current().record("node", tracing::field::display(node.display()));
    }
    Ok(detachment)
}

/// Logs out lunbd's sessions that the unit was on, where nothing else is on them. The call
/// waits for an attach that uses such a session, so it holds no lock here that the attach could
/// wait for.
fn end_sessions(
    engine: &Engine,
    mut detachment: Detachment,
    resolved: &ResolvedUnit,
    request: &DetachRequest,
    call: &mut CallContext,
) -> Result<Detachment, DetachFailure> {
    if request.keep_sessions {
        return Ok(detachment);
    }
    match end_sessions_behind(engine, &detachment, resolved, request, call) {
        Ok(ended) => {
            detachment.logged_out = ended;
            Ok(detachment)
        }
        Err(error) => Err(DetachFailure::after(error, detachment.receipt)),
    }
}

fn end_sessions_behind(
    engine: &Engine,
    detachment: &Detachment,
    resolved: &ResolvedUnit,
    request: &DetachRequest,
    call: &mut CallContext,
) -> Result<Vec<SessionId>> {
    let at = |error: Error| error.at(Stage::Logout);
    let paths = detachment.receipt.iter().flat_map(|receipt| &receipt.paths);
    let mut hosts: BTreeSet<_> = paths.map(|path| path.hctl.host).collect();
    hosts.extend(resolved.addresses.iter().map(|hctl| hctl.host));
    let first = match &request.target {
        DetachTarget::Source(source) => Some(source),
        DetachTarget::Device(_) | DetachTarget::Unit(_) => None,
    };
    for source in first.into_iter().chain(&request.more) {
        if let Source::Iscsi(uri) = source {
            hosts.extend(hosts_of_unfinished_logouts(engine, uri.target()).map_err(at)?);
        }
    }
    if !has_own_session(engine, &hosts).map_err(at)? {
        return Ok(Vec::new());
    }
    call.enter(Stage::Logout);
    end_unused_sessions(engine, &hosts, call.deadline)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::engine::detach::receipt::Receipt;
    use crate::kernel::Roots;

    #[test]
    fn the_receipt_of_what_was_taken_down_is_in_the_failure_to_look_for_its_session() {
        let root = tempfile::tempdir().unwrap();
        let engine = Engine::start(Roots::below(root.path())).unwrap();
        // The class is a file, so it cannot be listed.
        let class = engine.roots().sysfs.join("class");
        fs::create_dir_all(&class).unwrap();
        fs::write(class.join("iscsi_session"), "").unwrap();
        let request = DetachRequest::new(
            "iscsi://127.0.0.1/iqn.2026-01.net.example:a/3"
                .parse::<DetachTarget>()
                .unwrap(),
        );
        let place = Place::Scsi {
            hctl: None,
            name: None,
        };
        let mut detachment = Detachment::unchanged(place);
        let notes = vec!["taken down".to_owned()];
        detachment.receipt = Some(Receipt {
            notes: notes.clone(),
            ..Receipt::default()
        });
        let soon = Deadline::after(std::time::Duration::from_secs(30));
        let mut call = CallContext::new(Call::Detach, None, soon);
        let ended = end_sessions(
            &engine,
            detachment,
            &ResolvedUnit::default(),
            &request,
            &mut call,
        );
        let failure = ended.unwrap_err();
        assert_eq!(failure.stage(), Some(Stage::Logout), "{failure}");
        assert_eq!(failure.receipt.notes, notes);
    }
}
