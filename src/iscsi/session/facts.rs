//! All that sysfs shows of a session.

use std::collections::BTreeMap;

use super::IscsiSession;
use crate::error::Result;
use crate::id::{Hctl, HostNo, Iqn, Portal, SessionId};

/// The attributes of a session in `/sys/class/iscsi_session/sessionN`: what was agreed on,
/// and times in seconds.
const OF_SESSION: [&str; 17] = [
    "abort_tmo",
    "data_pdu_in_order",
    "data_seq_in_order",
    "erl",
    "fast_abort",
    "first_burst_len",
    "ifacename",
    "immediate_data",
    "initial_r2t",
    "lu_reset_tmo",
    "max_burst_len",
    "max_outstanding_r2t",
    "recovery_tmo",
    "tgt_reset_tmo",
    "tpgt",
    "username",
    "username_in",
];
/// The attributes of its connection.
const OF_CONNECTION: [&str; 8] = [
    "address",
    "data_digest",
    "header_digest",
    "max_recv_dlength",
    "max_xmit_dlength",
    "ping_tmo",
    "port",
    "recv_tmo",
];

/// The attributes of its SCSI host in `/sys/class/iscsi_host/hostN`: our end of the
/// connection.
const OF_HOST: [&str; 3] = ["hwaddress", "ipaddress", "netdev"];

/// All that iscsiadm shows of a session, without secrets.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct SessionFacts {
    /// Its number.
    pub id: SessionId,
    /// Its SCSI host.
    pub host: Option<HostNo>,
    /// `LOGGED_IN`, `FAILED`, `FREE`.
    pub state: String,
    /// `up`, `down`, `failed` (`connection_state_names` of
    /// `drivers/scsi/scsi_transport_iscsi.c`); `None` if the kernel does not show it, as
    /// older ones do not.
    pub connection_state: Option<String>,
    /// Whether lunbd made it.
    pub ours: bool,
    /// See [`IscsiSession::creator`].
    pub creator: Option<i32>,
    /// The initiator that has logged in.
    pub initiator: Option<Iqn>,
    /// The target.
    pub target: Option<Iqn>,
    /// The portal, as the caller named it.
    pub portal: Option<Portal>,
    /// The SCSI devices on it.
    pub devices: Vec<Hctl>,
    /// What was agreed on and set, by the kernel's names. What the kernel does not show, as
    /// for a lost connection, is left out.
    pub parameters: BTreeMap<&'static str, String>,
}

impl IscsiSession {
    /// What sysfs shows now; `None` if the session is gone.
    ///
    /// # Errors
    /// If it cannot be read; a parameter that cannot be read is left out.
    pub fn facts(&self) -> Result<Option<SessionFacts>> {
        let Some(state) = self.state()? else {
            return Ok(None);
        };
        let of_session = OF_SESSION.map(|name| (name, self.attribute(name)));
        let of_connection = OF_CONNECTION.map(|name| (name, self.connection_attribute(name)));
        let of_host = OF_HOST.map(|name| (name, self.host_attribute(name)));
        let read = of_session.into_iter().chain(of_connection).chain(of_host);
        let parameters = read.filter_map(|(name, value)| Some((name, value.ok()??)));
        let (initiator, target, portal) = match self.name()? {
            Some(name) => (Some(name.initiator), Some(name.target), Some(name.portal)),
            None => (None, None, None),
        };
        Ok(Some(SessionFacts {
            id: self.id(),
            host: self.host()?,
            state,
            connection_state: self.connection_attribute("state")?,
            ours: self.is_lunbd_owned()?,
            creator: self.creator()?,
            initiator,
            target,
            portal,
            devices: self.devices()?,
            parameters: parameters.collect(),
        }))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::kernel::Roots;

    /// A machine with session 4 on host 3.
    fn machine(creator: &str, interface: &str) -> (tempfile::TempDir, IscsiSession) {
        let root = tempfile::tempdir().unwrap();
        let sys = root.path().join("sys");
        let device = sys.join("devices/platform/host3/session4");
        let class = device.join("iscsi_session/session4");
        let connection = device.join("connection4:0/iscsi_connection/connection4:0");
        let host = sys.join("devices/platform/host3/iscsi_host/host3");
        let unit = device.join("target3:0:0/3:0:0:7");
        for dir in [&class, &connection, &host, &unit] {
            fs::create_dir_all(dir).unwrap();
        }
        for (dir, kind) in [(&class, "session"), (&connection, "connection")] {
            let classes = sys.join(format!("class/iscsi_{kind}"));
            fs::create_dir_all(&classes).unwrap();
            symlink(dir, classes.join(dir.file_name().unwrap())).unwrap();
        }
        for (dir, name, value) in [
            (&class, "state", "LOGGED_IN"),
            (&class, "creator", creator),
            (&class, "ifacename", interface),
            (&class, "initiatorname", "iqn.2026-01.example:host"),
            (&class, "targetname", "iqn.2026-01.example:array"),
            (&class, "recovery_tmo", "120"),
            (&connection, "persistent_address", "fe80::1"),
            (&connection, "persistent_port", "3261"),
            (&connection, "header_digest", "1"),
            (&connection, "state", "up"),
            (&host, "ipaddress", "fe80::2"),
        ] {
            fs::write(dir.join(name), format!("{value}\n")).unwrap();
        }
        let session = IscsiSession::new(&Roots::below(root.path()), SessionId(4));
        (root, session)
    }

    #[test]
    fn a_session_is_read_with_its_devices_and_what_it_does_not_say_is_left_out() {
        let (_root, session) = machine("-1", "lunbd");
        let facts = session.facts().unwrap().unwrap();
        assert_eq!((facts.host, facts.ours), (Some(HostNo(3)), true));
        assert_eq!(facts.connection_state.as_deref(), Some("up"));
        assert_eq!(facts.devices, ["3:0:0:7".parse().unwrap()]);
        assert_eq!(facts.portal, Some("[fe80::1]:3261".parse().unwrap()));
        let expected = [
            ("header_digest", "1"),
            ("ifacename", "lunbd"),
            ("ipaddress", "fe80::2"),
            ("recovery_tmo", "120"),
        ];
        let expected = expected.map(|(name, value)| (name, value.to_owned()));
        assert_eq!(facts.parameters, BTreeMap::from(expected));
    }

    #[test]
    fn a_session_without_a_creator_is_ours_only_with_our_interface() {
        for (creator, interface, ours) in [
            ("-1", "lunbd", true),
            ("-1", "default", false),
            ("-1", "(null)", false),
            ("812", "lunbd", false),
        ] {
            let (_root, session) = machine(creator, interface);
            assert_eq!(
                session.is_lunbd_owned().unwrap(),
                ours,
                "{creator} {interface}"
            );
        }
    }

    #[test]
    fn a_session_that_is_gone_has_no_facts() {
        let (root, session) = machine("-1", "lunbd");
        let roots = Roots::below(root.path());
        assert_eq!(IscsiSession::all(&roots).unwrap(), [session]);
        let gone = IscsiSession::new(&roots, SessionId(5));
        assert_eq!(gone.facts().unwrap(), None);
        assert!(!gone.is_there() && !gone.is_lunbd_owned().unwrap());
        assert_eq!(
            (gone.name().unwrap(), gone.devices().unwrap()),
            (None, vec![])
        );
    }
}
