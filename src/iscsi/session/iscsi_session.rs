//! A session as sysfs shows it, no matter which program made it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::SessionName;
use super::settings::{INTERFACE, REQUIRES_DIGESTS};
use crate::error::{Error, Result};
use crate::id::{Hctl, HostNo, Iqn, Portal, SessionId};
use crate::iscsi::Proven;
use crate::kernel::{Roots, sysfs};

/// A session: `/sys/class/iscsi_session/sessionN`. A number is not used twice
/// while the module is loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IscsiSession {
    id: SessionId,
    class: PathBuf,
    connection: PathBuf,
}

/// Which parts of a connection's PDUs have a checksum (CRC32C).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Digests {
    /// The headers.
    pub header: bool,
    /// The data.
    pub data: bool,
}

/// The status of a session's connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectionStatus {
    /// It carries I/O.
    LoggedIn,
    /// It is lost, and I/O waits for a new one.
    Lost,
    /// I/O fails until there is a new connection. It was lost for longer than the session's
    /// recovery timeout, or the session is being created and never had one.
    GivenUp,
    /// The session has none, or its target was removed: the session is being made or ended.
    Ending,
}

impl ConnectionStatus {
    /// Whether the session needs a new connection.
    #[must_use]
    pub fn is_lost(self) -> bool {
        matches!(self, Self::Lost | Self::GivenUp)
    }
}

impl IscsiSession {
    /// The state of a session that serves I/O (`iscsi_session_state_names`).
    pub const LOGGED_IN: &str = "LOGGED_IN";
    /// The state of a session whose connection was lost for too long, or that was never
    /// started.
    pub const FREE: &str = "FREE";

    /// The session of this number, whether it exists or not.
    #[must_use]
    pub fn new(roots: &Roots, id: SessionId) -> Self {
        let class = roots.sysfs.join("class");
        Self {
            id,
            connection: class.join(format!("iscsi_connection/connection{id}:0")),
            class: class.join(format!("iscsi_session/session{id}")),
        }
    }

    /// All sessions of this machine, sorted by their numbers as text.
    ///
    /// # Errors
    /// If they cannot be listed.
    pub fn all(roots: &Roots) -> Result<Vec<Self>> {
        let names = sysfs::names(&roots.sysfs.join("class/iscsi_session"))?;
        Ok(Self::of_names(roots, &names))
    }

    /// The sessions of one SCSI host; each session of `iscsi_tcp` has a host of its own.
    ///
    /// # Errors
    /// If they cannot be listed.
    pub fn of_host(roots: &Roots, host: HostNo) -> Result<Vec<Self>> {
        let dir = roots
            .sysfs
            .join(format!("class/scsi_host/host{host}/device"));
        Ok(Self::of_names(roots, &sysfs::names(&dir)?))
    }

    fn of_names(roots: &Roots, names: &[String]) -> Vec<Self> {
        let ids = names.iter().filter_map(|name| name.strip_prefix("session"));
        let ids = ids.filter_map(|id| id.parse().ok());
        ids.map(|id| Self::new(roots, id)).collect()
    }

    /// Its number.
    #[must_use]
    pub fn id(&self) -> SessionId {
        self.id
    }

    /// Whether sysfs shows it.
    #[must_use]
    pub fn is_there(&self) -> bool {
        self.class.exists()
    }

    /// `LOGGED_IN`, `FAILED` (lost, and devices wait), `FREE` (given up); `None` if it is
    /// gone.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn state(&self) -> Result<Option<String>> {
        self.attribute("state")
    }

    pub(super) fn attribute(&self, name: &str) -> Result<Option<String>> {
        sysfs::read_if_there(&self.class.join(name))
    }

    pub(super) fn connection_attribute(&self, name: &str) -> Result<Option<String>> {
        sysfs::read_if_there(&self.connection.join(name))
    }

    /// An attribute of its SCSI host; `None` also if it no longer has a host.
    pub(super) fn host_attribute(&self, name: &str) -> Result<Option<String>> {
        let (dir, host) = (self.host_dir()?, self.host()?);
        let (Some(dir), Some(host)) = (dir, host) else {
            return Ok(None);
        };
        sysfs::read_if_there(&dir.join(format!("iscsi_host/host{host}")).join(name))
    }

    /// Its SCSI host; `None` if it is gone.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn host(&self) -> Result<Option<HostNo>> {
        let dir = self.host_dir()?;
        let name = dir.as_deref().and_then(|dir| dir.file_name()?.to_str());
        Ok(name.and_then(|name| name.strip_prefix("host")?.parse().ok()))
    }

    /// Whether lunbd made it: its creator is no process, and its interface has our name. A
    /// session of iscsid has the daemon's process number as creator, and a session of another
    /// program has another interface.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn is_lunbd_owned(&self) -> Result<bool> {
        let interface = self.attribute("ifacename")?;
        Ok(interface.as_deref() == Some(INTERFACE) && self.is_of_no_process()?)
    }

    /// Its creator: the netlink port from which it was made. It is -1 for a session that
    /// iscsid leaves alone, another negative number for one of ours that was made while a
    /// process had the port -1, and the daemon's process number for a session of iscsid.
    /// `None` if the session is gone.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn creator(&self) -> Result<Option<i32>> {
        let creator = self.attribute("creator")?;
        Ok(creator.and_then(|creator| creator.parse().ok()))
    }

    fn is_of_no_process(&self) -> Result<bool> {
        Ok(self.creator()?.is_some_and(|creator| creator < 0))
    }

    /// Whether it has no names, carries no I/O, and has no daemon's number as creator: a
    /// process other than iscsid is making it, or was killed while it did.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn has_no_names(&self) -> Result<bool> {
        if !self.carries_no_io()? || !self.is_of_no_process()? {
            return Ok(false);
        }
        let has_name = |name| {
            let value = self.attribute(name)?;
            // The kernel prints `(null)` for no name.
            let named = value.filter(|value| !value.is_empty() && value != "(null)");
            Ok::<_, Error>(named.is_some())
        };
        Ok(!has_name("targetname")? && !has_name("ifacename")?)
    }

    /// Whether it is a session of `iscsi_tcp` that was made as ours are, or has our mark, and
    /// lacks some of its names: a process is making it, or was killed while it did.
    pub(super) fn is_incomplete(&self, roots: &Roots) -> Result<bool> {
        let may_be_ours =
            self.carries_no_io()? && (self.has_no_names()? || self.is_lunbd_owned()?);
        if !may_be_ours || self.name()?.is_some() {
            return Ok(false);
        }
        let Some(host) = self.host()? else {
            return Ok(false);
        };
        let driver = roots
            .sysfs
            .join(format!("class/scsi_host/host{host}/proc_name"));
        let driver = sysfs::read_if_there(&driver)?;
        Ok(driver.as_deref() == Some("iscsi_tcp") && self.devices()?.is_empty())
    }

    /// Whether it is lost or being made. A session that lost a connection which was bound and
    /// never started is FAILED and not FREE.
    fn carries_no_io(&self) -> Result<bool> {
        let state = self.state()?;
        Ok(state.is_some_and(|state| state != Self::LOGGED_IN))
    }

    /// Its initiator, target and portal; `None` if sysfs does not show all of them, as in the
    /// middle of a login.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn name(&self) -> Result<Option<SessionName>> {
        let initiator = self.attribute("initiatorname")?;
        let initiator = initiator.and_then(|name| name.parse().ok());
        let target = self.attribute("targetname")?;
        let target = target.and_then(|name| name.parse().ok());
        let address = self.connection_attribute("persistent_address")?;
        let port = self.connection_attribute("persistent_port")?;
        let port = port.and_then(|port| port.parse().ok());
        let portal = address.and_then(|address| Portal::new(&address, Some(port?)));
        let names = initiator.zip(target).zip(portal);
        Ok(names.map(|((initiator, target), portal)| SessionName {
            initiator,
            target,
            portal,
        }))
    }

    /// The initiator and the target of a session of ours whose logout was begun: it no longer
    /// has a connection, and with that its portal is gone. `None` for any other session, also
    /// for one that is being made, since it gets its names only with a connection.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn unbound_endpoints(&self) -> Result<Option<(Iqn, Iqn)>> {
        if self.has_connection() || !self.is_lunbd_owned()? {
            return Ok(None);
        }
        let name = |attribute| {
            let name = self.attribute(attribute)?;
            Ok::<Option<Iqn>, Error>(name.and_then(|name| name.parse().ok()))
        };
        Ok(name("initiatorname")?.zip(name("targetname")?))
    }

    /// The SCSI devices on it.
    ///
    /// # Errors
    /// If they cannot be listed.
    pub fn devices(&self) -> Result<Vec<Hctl>> {
        let mut devices = Vec::new();
        let Some(dir) = self.device_dir()? else {
            return Ok(devices);
        };
        // hostH/sessionN/targetH:C:T/H:C:T:L
        for name in sysfs::names(&dir)? {
            if name.starts_with("target") {
                let inside = sysfs::names(&dir.join(&name))?;
                devices.extend(inside.iter().filter_map(|name| name.parse::<Hctl>().ok()));
            }
        }
        Ok(devices)
    }

    /// Whether the kernel is removing its target, of which the last device is gone.
    pub(crate) fn is_losing_its_target(&self) -> Result<bool> {
        Ok(self.devices()?.is_empty() && self.has_targets()?)
    }

    /// Whether the kernel has a target on it, also one that has lost its last device.
    pub(crate) fn has_targets(&self) -> Result<bool> {
        let Some(dir) = self.device_dir()? else {
            return Ok(false);
        };
        let names = sysfs::names(&dir)?;
        Ok(names.iter().any(|name| name.starts_with("target")))
    }

    /// The directory of its device, `.../hostH/sessionN`: that of the class is in it, in
    /// `iscsi_session/sessionN`. `None` if it is gone.
    fn device_dir(&self) -> Result<Option<PathBuf>> {
        let class = sysfs::resolve(&self.class)?;
        let dir = class.as_deref().and_then(|dir| dir.parent()?.parent());
        Ok(dir.map(Path::to_owned))
    }

    /// The directory of its host.
    pub(super) fn host_dir(&self) -> Result<Option<PathBuf>> {
        let dir = self.device_dir()?;
        Ok(dir.as_deref().and_then(Path::parent).map(Path::to_owned))
    }

    /// Whether its target was removed, as in a logout that has begun. The kernel prints
    /// `ISCSI_MAX_TARGET` as -1.
    pub(super) fn is_unbound(&self) -> Result<bool> {
        let target = self.attribute("target_id")?;
        Ok(target.is_none_or(|target| target == "-1"))
    }

    /// The status of its connection, whether the session is ours or not; `None` if the session
    /// is gone.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn connection_status(&self) -> Result<Option<ConnectionStatus>> {
        let Some(state) = self.state()? else {
            return Ok(None);
        };
        // Kernels before 5.9 do not show it.
        let connection = self.connection_attribute("state")?;
        Ok(Some(match (state.as_str(), connection.as_deref()) {
            _ if !self.has_connection() || self.is_unbound()? => ConnectionStatus::Ending,
            // A connection is down when it is made and when it is ended, and not after a loss
            // (`iscsi_conn_state`).
            (_, Some("down")) => ConnectionStatus::Ending,
            // The session's state follows later, from a work item of its own.
            (Self::LOGGED_IN, Some("failed")) => ConnectionStatus::Lost,
            (Self::LOGGED_IN, _) => ConnectionStatus::LoggedIn,
            (Self::FREE, _) => ConnectionStatus::GivenUp,
            _ => ConnectionStatus::Lost,
        }))
    }

    /// Whether its connection is bound and not started, as in the middle of a login. A
    /// session of iscsid, which logs in through the kernel, is so for as long as the target
    /// takes.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn is_at_login(&self) -> Result<bool> {
        // `connection_state_names` of scsi_transport_iscsi.c.
        Ok(self.connection_attribute("state")?.as_deref() == Some("bound"))
    }

    /// How long I/O waits for its connection when that is lost; `None` if it waits for ever,
    /// or the session is gone.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn recovery_timeout(&self) -> Result<Option<Duration>> {
        // The kernel prints "off" for a negative value.
        let seconds = self.attribute("recovery_tmo")?;
        let seconds = seconds.and_then(|seconds| seconds.parse().ok());
        Ok(seconds.map(Duration::from_secs))
    }

    /// How its sides proved themselves at the login that made it or at a later one, as
    /// lunbd marked it in `username_in`. Another program's session has no mark and
    /// gives `Nothing`; so does a session of a lunbd release that wrote no marks.
    ///
    /// # Errors
    /// If it cannot be read, as without `CAP_SYS_ADMIN`.
    pub fn proven(&self) -> Result<Proven> {
        let mark = self.attribute("username_in")?;
        Ok(Proven::of_mark(mark.as_deref()))
    }

    /// Whether it must not be logged in again without digests, as lunbd marked it in
    /// `username`.
    ///
    /// # Errors
    /// If it cannot be read, as without `CAP_SYS_ADMIN`.
    pub fn requires_digests(&self) -> Result<bool> {
        Ok(self.attribute("username")?.as_deref() == Some(REQUIRES_DIGESTS))
    }

    /// Whether it has checksums over headers, and over data. The kernel forgets both when the
    /// connection is lost.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn digests(&self) -> Result<Digests> {
        let has = |name| {
            let value = self.connection_attribute(name)?;
            Ok::<_, Error>(value.as_deref() == Some("1"))
        };
        Ok(Digests {
            header: has("header_digest")?,
            data: has("data_digest")?,
        })
    }

    pub(super) fn has_connection(&self) -> bool {
        self.connection.exists()
    }

    /// Its state in words, for errors.
    pub(in crate::iscsi) fn describe(&self) -> String {
        match self.state() {
            Ok(Some(state)) => format!("session {} is {state}", self.id),
            Ok(None) => format!("session {} is gone", self.id),
            Err(error) => error.to_string(),
        }
    }
}
