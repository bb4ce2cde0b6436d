//! Finds sessions that are already logged in, by portal and target.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::{MissingReason, Route, RouteKind, RouteUnavailable};
use crate::error::Result;
use crate::id::{Hctl, HostNo, Iqn, IscsiUri, Lun, Portal, PortalHost, SessionId};
use crate::kernel::{Roots, sysfs};

/// The state of a session that serves I/O (`scsi_transport_iscsi.c`,
/// `iscsi_session_state_names`).
const LOGGED_IN: &str = "LOGGED_IN";

/// The paths to this unit: a route for each session with the target through one of the
/// portals, and a route without a place for a portal that no session uses. They are in the
/// order of the portals, then of the sessions' numbers.
///
/// Two sessions with one target through one portal are two routes. A session belongs to the
/// portal that its login asked for (`persistent_address`), or else to the portal that it is
/// connected to (`address`), which differs after a redirect. Portals are compared as
/// addresses. A name is not resolved: it matches only a login by this name.
///
/// Minimum kernel: 5.10. Each session costs one attribute read, and each session with the
/// target about eight.
///
/// # Errors
/// Only those of reading the list of sessions.
pub fn iscsi_routes(roots: &Roots, uri: &IscsiUri) -> Result<Vec<Route>> {
    let order = uri.portals().iter().zip(0..);
    let order: BTreeMap<&Portal, usize> = order.collect();
    let mut found: BTreeMap<(usize, SessionId), Route> = BTreeMap::new();
    let mut elsewhere = Vec::new();
    for session in Session::all(roots)? {
        let id = session.id;
        match session.target() {
            Ok(Some(target)) if target == *uri.target() => {}
            Ok(_) => continue,
            Err(error) => {
                elsewhere.push(format!("session {id}, whose target is unknown: {error}"));
                continue;
            }
        }
        // The session went away meanwhile.
        let Some(device) = session.device() else {
            continue;
        };
        let portals = device.portals(roots);
        let named = portals
            .iter()
            .find_map(|portal| order.get_key_value(portal));
        let Some((&portal, &position)) = named else {
            elsewhere.push(match portals.first() {
                Some(portal) => format!("session {id} to {portal}"),
                None => format!("session {id}, whose portal cannot be read"),
            });
            continue;
        };
        let via = RouteKind::Iscsi {
            portal: portal.clone(),
            session: Some(id),
        };
        if let Some(place) = session.address(&device, uri.lun(), &via) {
            found.insert(
                (position, id),
                Route {
                    via,
                    address: place,
                },
            );
        }
    }
    for (&portal, &position) in &order {
        let sessions = (position, SessionId(0))..=(position, SessionId(u32::MAX));
        if found.range(sessions).next().is_none() {
            let key = (position, SessionId(0));
            found.insert(key, no_session(portal, uri.target(), &elsewhere));
        }
    }
    Ok(found.into_values().collect())
}

fn no_session(portal: &Portal, target: &Iqn, elsewhere: &[String]) -> Route {
    const SHOWN: usize = 3;
    let mut text = format!("no session with {target} through {portal}");
    if let PortalHost::Name(_) = portal.host() {
        text.push_str(" (a name is not looked up: name the address)");
    }
    if !elsewhere.is_empty() {
        let shown: Vec<_> = elsewhere.iter().take(SHOWN).map(String::as_str).collect();
        text = format!("{text}; there is {}", shown.join(", "));
    }
    if let more @ 1.. = elsewhere.len().saturating_sub(SHOWN) {
        text = format!("{text} and {more} more");
    }
    Route {
        via: RouteKind::Iscsi {
            portal: portal.clone(),
            session: None,
        },
        address: Err(RouteUnavailable::new(MissingReason::NoSession, text)),
    }
}

/// A session by number: `/sys/class/iscsi_session/sessionN`.
pub(super) struct Session {
    id: SessionId,
    class: PathBuf,
}

impl Session {
    pub(super) fn new(roots: &Roots, id: SessionId) -> Self {
        let class = roots.sysfs.join(format!("class/iscsi_session/session{id}"));
        Self { id, class }
    }

    pub(super) fn class(&self) -> &Path {
        &self.class
    }

    fn all(roots: &Roots) -> Result<Vec<Self>> {
        let names = sysfs::names(&roots.sysfs.join("class/iscsi_session"))?;
        let ids = names.iter().filter_map(|name| Self::of_name(name));
        Ok(ids.map(|id| Self::new(roots, id)).collect())
    }

    pub(super) fn of_name(name: &str) -> Option<SessionId> {
        name.strip_prefix("session")?.parse().ok()
    }

    /// The target's name; `None` if the session is gone, or before the login has set the
    /// name.
    pub(super) fn target(&self) -> Result<Option<Iqn>> {
        let name = sysfs::read_if_there(&self.class.join("targetname"))?;
        Ok(name.and_then(|name| name.parse().ok()))
    }

    /// The session's device; `None` if the session is gone.
    pub(super) fn device(&self) -> Option<SessionDevice> {
        // .../hostH/sessionN/iscsi_session/sessionN
        let class = sysfs::resolve(&self.class).ok()??;
        let dir = class.parent()?.parent()?;
        let host = dir.parent()?.file_name()?.to_str()?;
        Some(SessionDevice {
            host: host.strip_prefix("host")?.parse().ok()?,
            connections: format!("connection{}:", self.id),
            children: sysfs::names(dir).ok()?,
        })
    }

    /// The address of the unit; `None` if the session is gone.
    fn address(
        &self,
        device: &SessionDevice,
        lun: Lun,
        via: &RouteKind,
    ) -> Option<Result<Hctl, RouteUnavailable>> {
        let (state, shown) = match sysfs::read_if_there(&self.class.join("state")) {
            Ok(state) => {
                let state = state?;
                (state.clone(), state)
            }
            Err(error) => (
                "unreadable".to_owned(),
                format!("in no readable state: {error}"),
            ),
        };
        let target_id = sysfs::read_if_there(&self.class.join("target_id"));
        let target_id = target_id.ok().flatten();
        let (channel, target) = device.target(target_id.as_ref().and_then(|id| id.parse().ok()));
        let hctl = Hctl {
            host: device.host,
            channel,
            target,
            lun,
        };
        if state != LOGGED_IN {
            let reason = MissingReason::SessionDown { state };
            let missing = RouteUnavailable::new(reason, format!("{via} is {shown}"));
            return Some(Err(missing.at(Some(hctl))));
        }
        // A removed target prints as -1 (ISCSI_MAX_TARGET).
        if target_id.as_deref() == Some("-1") {
            let text = format!("{via} is logged in, and the kernel has removed its target");
            return Some(Err(RouteUnavailable::new(MissingReason::NoTarget, text)));
        }
        Some(Ok(hctl))
    }
}

/// The device of a session: `.../hostH/sessionN`.
pub(super) struct SessionDevice {
    host: HostNo,
    /// The prefix of the names of the session's connections.
    connections: String,
    children: Vec<String>,
}

impl SessionDevice {
    /// The portal that the login asked for, then the portal that the session is connected
    /// to. A portal that cannot be read, as on a dead connection, is left out.
    pub(super) fn portals(&self, roots: &Roots) -> Vec<Portal> {
        let class = roots.sysfs.join("class/iscsi_connection");
        let mut portals = Vec::new();
        for attributes in [
            ("persistent_address", "persistent_port"),
            ("address", "port"),
        ] {
            for connection in &self.children {
                if connection.starts_with(&self.connections) {
                    let dir = class.join(connection);
                    let address = sysfs::read(&dir.join(attributes.0)).ok();
                    let port = sysfs::parse(&dir.join(attributes.1)).ok();
                    portals.extend(address.zip(port).into_iter().flat_map(portals_at));
                }
            }
        }
        portals
    }

    /// Channel and target. The kernel scans channel 0 and the session's `target_id`
    /// (`iscsi_user_scan_session`). If the kernel does not show that id, the directory that
    /// an earlier scan left gives the target.
    fn target(&self, target_id: Option<u32>) -> (u32, u32) {
        let scanned = self.children.iter().find_map(|name| {
            let place: Hctl = format!("{}:0", name.strip_prefix("target")?).parse().ok()?;
            let is_it = place.host == self.host && target_id.is_none_or(|id| id == place.target);
            is_it.then_some((place.channel, place.target))
        });
        scanned.unwrap_or((0, target_id.unwrap_or(0)))
    }
}

/// The kernel prints IPv6 in full without brackets, but a daemon may have set the address
/// with brackets. An address with a zone also matches without it.
fn portals_at((address, port): (String, u16)) -> impl Iterator<Item = Portal> {
    let address = address.trim();
    let bare = address
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'));
    let bare = bare.unwrap_or(address);
    let without_zone = bare.split_once('%').map(|(address, _zone)| address);
    let portals = [Some(bare), without_zone].map(|host| Portal::new(host?, Some(port)));
    portals.into_iter().flatten()
}
