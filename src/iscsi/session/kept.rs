//! The settings that a session keeps over a loss, so that any process logs it in again
//! unchanged.

use super::unmet::non_null;
use super::{IscsiSession, SessionOptions};
use crate::error::{Error, Result};
use crate::iscsi::tunables::{Tunable, Tunables};
use crate::kernel::iscsi_netlink::HostParam;
use crate::kernel::tcp::LocalEnd;

/// Marks the address from which a session of lunbd logs in. The mark is in the kernel's
/// field for the hardware address of the interface, which nothing reads.
const SOURCE: &str = "lunbd:source:";

/// The parameters of a session's host that store the local end of its connection in the
/// kernel, for as long as the session exists.
pub(super) fn host_params(local: &LocalEnd) -> Vec<(HostParam, String)> {
    let interface = local.interface.as_ref();
    let interface = interface.map(|name| (HostParam::NetworkInterface, name.to_string()));
    let mark = |address| (HostParam::HardwareAddress, format!("{SOURCE}{address}"));
    interface
        .into_iter()
        .chain(local.address.map(mark))
        .collect()
}

impl SessionOptions {
    /// Takes the lengths that were negotiated for `session`, which lunbd must have made,
    /// and the local end of its connection. Its times stay in the kernel.
    ///
    /// # Errors
    /// Those of reading sysfs.
    pub(crate) fn with_settings_of(mut self, session: &IscsiSession) -> Result<Self> {
        let of_session = |name| Ok::<_, Error>(number(session.attribute(name)?));
        let of_connection = |name| Ok::<_, Error>(number(session.connection_attribute(name)?));
        let max = of_session("max_burst_len")?;
        let first = of_session("first_burst_len")?;
        let lengths = [
            (Tunable::MaxBurst, max),
            // Without unsolicited data it may exceed the maximum, and has no effect.
            (
                Tunable::FirstBurst,
                first.map(|first| first.min(max.unwrap_or(first))),
            ),
            (Tunable::ReceiveSegment, of_connection("max_recv_dlength")?),
            (Tunable::SendSegment, of_connection("max_xmit_dlength")?),
        ];
        let mut tunables = Tunables::default();
        for (tunable, length) in lengths {
            // A length that was never set reads as 0.
            if let Some(length) = length.filter(|length| tunable.limits().contains(length)) {
                tunables.set(tunable, length)?;
            }
        }
        self.tunables = tunables;
        let interface = session.host_attribute("netdev")?.and_then(non_null);
        let mark = session.host_attribute("hwaddress")?.and_then(non_null);
        self.local = LocalEnd {
            interface: interface.and_then(|name| name.parse().ok()),
            address: mark.and_then(|mark| mark.strip_prefix(SOURCE)?.parse().ok()),
        };
        Ok(self)
    }
}

fn number(text: Option<String>) -> Option<u32> {
    text?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::id::SessionId;
    use crate::kernel::Roots;

    #[test]
    fn a_session_is_logged_in_again_with_its_lengths_and_from_its_own_end() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let device = roots.sysfs.join("devices/platform/host3/session4");
        let class = device.join("iscsi_session/session4");
        let connection = device.join("connection4:0");
        let host = roots.sysfs.join("devices/platform/host3/iscsi_host/host3");
        let local = LocalEnd {
            interface: Some("eth0".parse().unwrap()),
            address: Some("fe80::5".parse().unwrap()),
        };
        let params = host_params(&local);
        let values = [
            (&class, "first_burst_len", "65536"),
            (&class, "max_burst_len", "16384"),
            (&connection, "max_recv_dlength", "0"),
            (&connection, "max_xmit_dlength", "8192"),
            (&host, "netdev", &params[0].1),
            (&host, "hwaddress", &params[1].1),
        ];
        for (dir, name, value) in values {
            fs::create_dir_all(dir).unwrap();
            fs::write(dir.join(name), format!("{value}\n")).unwrap();
        }
        for (kind, name, dir) in [
            ("session", "session4", &class),
            ("connection", "connection4:0", &connection),
        ] {
            let classes = roots.sysfs.join(format!("class/iscsi_{kind}"));
            fs::create_dir_all(&classes).unwrap();
            symlink(dir, classes.join(name)).unwrap();
        }
        let session = IscsiSession::new(&roots, SessionId(4));
        let options = SessionOptions::new("iqn.2026-01.example:host".parse().unwrap());
        let options = options.with_settings_of(&session).unwrap();
        let chosen = |tunable| options.tunables.chosen(tunable);
        assert_eq!(chosen(Tunable::FirstBurst), Some(16384));
        assert_eq!(chosen(Tunable::MaxBurst), Some(16384));
        assert_eq!(chosen(Tunable::ReceiveSegment), None);
        assert_eq!(chosen(Tunable::SendSegment), Some(8192));
        assert_eq!(options.local, local);
        fs::write(host.join("netdev"), "(null)\n").unwrap();
        fs::write(host.join("hwaddress"), "02:00:00:00:00:01\n").unwrap();
        let options = options.with_settings_of(&session).unwrap();
        assert_eq!(options.local, LocalEnd::default());
    }
}
