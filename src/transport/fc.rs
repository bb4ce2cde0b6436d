//! Fibre Channel target ports, as the local ports see them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use super::{MissingReason, Route, RouteKind, RouteUnavailable};
use crate::error::Result;
use crate::id::{FcUri, Hctl, HostNo, Lun, Wwpn};
use crate::kernel::{Roots, sysfs};

/// The paths to this unit: a route for each local port that sees one of the target's ports,
/// and a route without a place for a port that no local port sees. They are in the order of
/// the URI's ports, then of the hosts' numbers.
///
/// A remote port is usable if it is online or marginal and has the role of a SCSI target,
/// because the kernel scans these ports (`scsi_transport_fc.c`, `fc_user_scan_tgt`). A
/// local port may know the same remote port twice, as after it came back with another
/// number. Then only a usable one is a path.
///
/// Minimum kernel: 5.10. Each remote port costs one attribute read, and each remote port of
/// the URI three more.
///
/// # Errors
/// Only those of reading the lists of ports.
pub fn fc_routes(roots: &Roots, uri: &FcUri) -> Result<Vec<Route>> {
    let order: BTreeMap<Wwpn, usize> = uri.ports().iter().copied().zip(0..).collect();
    let mut found: BTreeMap<(usize, HostNo, RportName), Route> = BTreeMap::new();
    let mut unreadable = Vec::new();
    for rport in RemotePort::all(roots)? {
        let wwpn = match rport.wwpn() {
            Ok(Some(wwpn)) => wwpn,
            // The port is gone meanwhile.
            Ok(None) => continue,
            Err(error) => {
                let name = rport.name;
                unreadable.push(format!("{name}, whose name cannot be read: {error}"));
                continue;
            }
        };
        if let Some(&position) = order.get(&wwpn)
            && let Some(address) = rport.address(wwpn, uri.lun())
        {
            let via = RouteKind::Fc {
                host: Some(rport.name.host),
                wwpn,
                rport: Some(rport.name.to_string()),
            };
            let key = (position, rport.name.host, rport.name);
            found.insert(key, Route { via, address });
        }
    }
    let usable = found.iter().filter(|(_, route)| route.address.is_ok());
    let usable: BTreeSet<_> = usable
        .map(|((position, host, _), _)| (*position, *host))
        .collect();
    found.retain(|(position, host, _), route| {
        route.address.is_ok() || !usable.contains(&(*position, *host))
    });

    let mut routes: Vec<(usize, Route)> = found
        .into_iter()
        .map(|((position, ..), route)| (position, route))
        .collect();
    let seen: BTreeSet<usize> = routes.iter().map(|(position, _)| *position).collect();
    let unseen: Vec<_> = order
        .iter()
        .filter(|(_, position)| !seen.contains(position))
        .collect();
    if !unseen.is_empty() {
        let (reason, why) = why_unseen(roots, &unreadable)?;
        for (&wwpn, &position) in unseen {
            routes.push((position, route_without_port(wwpn, reason.clone(), &why)));
        }
        routes.sort_by_key(|(position, _)| *position);
    }
    Ok(routes.into_iter().map(|(_, route)| route).collect())
}

fn route_without_port(wwpn: Wwpn, reason: MissingReason, why: &str) -> Route {
    Route {
        via: RouteKind::Fc {
            host: None,
            wwpn,
            rport: None,
        },
        address: Err(RouteUnavailable::new(
            reason,
            format!("no local port sees {wwpn}: {why}"),
        )),
    }
}

/// The reason why no local port sees a remote port.
fn why_unseen(roots: &Roots, unreadable: &[String]) -> Result<(MissingReason, String)> {
    let class = roots.sysfs.join("class/fc_host");
    let hosts = sysfs::names(&class)?;
    if hosts.is_empty() {
        let why = "this machine has no Fibre Channel port".to_owned();
        return Ok((MissingReason::NoHosts, why));
    }
    let state = |host: &String| {
        let state = sysfs::read(&class.join(host).join("port_state"));
        let state = state.unwrap_or_else(|_| "in no readable state".to_owned());
        format!("{host} is {state}")
    };
    let mut why: Vec<String> = hosts.iter().map(state).collect();
    why.extend(unreadable.iter().map(|rport| format!("there is {rport}")));
    Ok((MissingReason::NoRemotePort, why.join(", ")))
}

/// The kernel's name of a remote port, `rport-H:C-R`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct RportName {
    host: HostNo,
    channel: u32,
    number: u32,
}

impl RportName {
    pub(super) fn parse(name: &str) -> Option<Self> {
        let (host, rest) = name.strip_prefix("rport-")?.split_once(':')?;
        let (channel, number) = rest.split_once('-')?;
        Some(Self {
            host: host.parse().ok()?,
            channel: channel.parse().ok()?,
            number: number.parse().ok()?,
        })
    }
}

impl std::fmt::Display for RportName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rport-{}:{}-{}", self.host, self.channel, self.number)
    }
}

/// A remote port, `/sys/class/fc_remote_ports/rport-H:C-R`.
pub(super) struct RemotePort {
    name: RportName,
    class: PathBuf,
}

impl RemotePort {
    pub(super) fn new(roots: &Roots, name: RportName) -> Self {
        let class = roots.sysfs.join(format!("class/fc_remote_ports/{name}"));
        Self { name, class }
    }

    fn all(roots: &Roots) -> Result<Vec<Self>> {
        let names = sysfs::names(&roots.sysfs.join("class/fc_remote_ports"))?;
        let names = names.iter().filter_map(|name| RportName::parse(name));
        Ok(names.map(|name| Self::new(roots, name)).collect())
    }

    /// The port's name; `None` if the port is gone.
    pub(super) fn wwpn(&self) -> Result<Option<Wwpn>> {
        let name = sysfs::read_if_there(&self.class.join("port_name"))?;
        Ok(name.and_then(|name| name.parse().ok()))
    }

    /// The address of the unit; `None` if the port is gone.
    fn address(&self, wwpn: Wwpn, lun: Lun) -> Option<Result<Hctl, RouteUnavailable>> {
        match self.target(wwpn, lun) {
            Ok(target) => target.map(|target| Ok(self.hctl(target, lun))),
            Err(missing) => Some(Err(missing)),
        }
    }

    fn hctl(&self, target: u32, lun: Lun) -> Hctl {
        Hctl {
            host: self.name.host,
            channel: self.name.channel,
            target,
            lun,
        }
    }

    /// The number of the port's SCSI target.
    fn target(&self, wwpn: Wwpn, lun: Lun) -> Result<Option<u32>, RouteUnavailable> {
        let missing = |reason, what: &str| {
            let text = format!("{} to {wwpn} {what}", self.name);
            RouteUnavailable::new(reason, text)
        };
        let read = |attribute| {
            sysfs::read_if_there(&self.class.join(attribute)).map_err(|error| {
                let state = "unreadable".to_owned();
                let what = format!("cannot be examined: {error}");
                missing(MissingReason::PortDown { state }, &what)
            })
        };
        // The state is read first, because a port that is not present has lost its role
        // too.
        let Some(state) = read("port_state")? else {
            return Ok(None);
        };
        if !matches!(state.as_str(), "Online" | "Marginal") {
            let what = format!("is {state}");
            let down = missing(MissingReason::PortDown { state }, &what);
            let target = read("scsi_target_id")?.and_then(|target| target.parse().ok());
            return Err(down.at(target.map(|target| self.hctl(target, lun))));
        }
        let Some(roles) = read("roles")? else {
            return Ok(None);
        };
        if !roles.split(", ").any(|role| role == "FCP Target") {
            let what = format!("is no SCSI target; its roles: {roles}");
            return Err(missing(MissingReason::NotATarget, &what));
        }
        let Some(target) = read("scsi_target_id")? else {
            return Ok(None);
        };
        // The number is -1 if the kernel has made no target of the port.
        target.parse().map(Some).map_err(|_| {
            let what = format!("has no SCSI target number: {target:?}");
            missing(MissingReason::NotATarget, &what)
        })
    }
}
