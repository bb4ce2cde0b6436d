//! The chosen settings that a session does not have, as sysfs shows it.

use std::fmt;

use super::{IscsiSession, Proof, SessionOptions};
use crate::id::Hctl;
use crate::iscsi::Proven;
use crate::iscsi::tunables::{KEPT_BY_THE_KERNEL, Tunable};
use crate::kernel::{Roots, sysfs};

/// A setting that a session, or a device on it, does not have as the caller chose it: the
/// session existed already, the target took less, or a process changed it since.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct UnmetSetting {
    /// The setting: a [`Tunable`]'s name, `recovery_timeout`, `header_digest`, `data_digest`,
    /// `interface` or `source_address`; `require_digests`, if a later login of the session may
    /// go without them; `proof`, if it is unknown whether the target proved its identity to
    /// another program as the caller's [credentials](SessionOptions::credentials) require; or
    /// `creator`, if another process had the [netlink port](IscsiSession::creator) when the
    /// session was made. An iscsid that starts later takes such a session over.
    pub name: &'static str,
    /// What the caller chose.
    pub wanted: String,
    /// What sysfs shows; `None` if it shows nothing, as for a session that is bound to no
    /// interface, and for the address of a lost connection.
    pub found: Option<String>,
}

impl fmt::Display for UnmetSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, wanted) = (self.name, &self.wanted);
        match &self.found {
            Some(found) => write!(f, "{name} is {found}, not {wanted}"),
            None => write!(f, "{name} is not known, and not {wanted} for certain"),
        }
    }
}

impl IscsiSession {
    /// The settings that `options` chooses and that this session, or this device on it, does
    /// not have now. A setting that cannot be read counts as one that it does not have.
    #[must_use]
    pub fn unmet(
        &self,
        roots: &Roots,
        options: &SessionOptions,
        device: Hctl,
    ) -> Vec<UnmetSetting> {
        let mut unmet = Vec::new();
        let mut compare = |name, wanted: String, found: Option<String>| {
            if found.as_ref() != Some(&wanted) {
                unmet.push(UnmetSetting {
                    name,
                    wanted,
                    found,
                });
            }
        };
        for (tunable, wanted) in options.tunables.iter() {
            let found = self.tunable(roots, tunable, device);
            compare(
                tunable.as_str(),
                wanted.to_string(),
                found.map(|value| value.to_string()),
            );
        }
        if let Some(limit) = options.recovery_timeout {
            let found = self.attribute("recovery_tmo").ok().flatten();
            compare("recovery_timeout", limit.as_secs().to_string(), found);
        }
        let digests = [
            ("header_digest", options.header_digest),
            ("data_digest", options.data_digest),
        ];
        for (name, _) in digests.into_iter().filter(|(_, is_wanted)| *is_wanted) {
            let found = self.connection_attribute(name).ok().flatten();
            let found = found.and_then(non_null).map(|value| digest_name(&value));
            compare(name, digest_name("1"), found);
        }
        if options.requires_digests {
            let found = self.requires_digests().ok();
            compare(
                "require_digests",
                true.to_string(),
                found.map(|is| is.to_string()),
            );
        }
        if let Some(Proof::Known(credentials)) = &options.proof
            && credentials.is_mutual()
            && !self.proven().is_ok_and(|proven| proven == Proven::Both)
        {
            compare("proof", "mutual CHAP".to_owned(), None);
        }
        let of_host = |name| self.host_attribute(name).ok().flatten().and_then(non_null);
        if let Some(interface) = &options.local.interface {
            compare("interface", interface.to_string(), of_host("netdev"));
        }
        if let Some(address) = &options.local.address {
            compare("source_address", address.to_string(), of_host("ipaddress"));
        }
        let creator = self.creator().ok().flatten();
        if creator != Some(-1) && self.is_lunbd_owned().unwrap_or(false) {
            let found = creator.map(|creator| creator.to_string());
            compare("creator", "-1".to_owned(), found);
        }
        unmet
    }

    fn tunable(&self, roots: &Roots, tunable: Tunable, device: Hctl) -> Option<u32> {
        let of_session = |name| self.attribute(name).ok().flatten();
        let of_connection = |name| self.connection_attribute(name).ok().flatten();
        let below = |dir: String, name: &str| {
            sysfs::read_if_there(&roots.sysfs.join(dir).join(name))
                .ok()
                .flatten()
        };
        let text = match tunable {
            Tunable::NopInterval => of_connection("recv_tmo"),
            Tunable::NopTimeout => of_connection("ping_tmo"),
            Tunable::AbortTimeout => of_session("abort_tmo"),
            Tunable::LuResetTimeout => of_session("lu_reset_tmo"),
            Tunable::TargetResetTimeout => of_session("tgt_reset_tmo"),
            Tunable::FirstBurst => of_session("first_burst_len"),
            Tunable::MaxBurst => of_session("max_burst_len"),
            Tunable::ReceiveSegment => of_connection("max_recv_dlength"),
            Tunable::SendSegment => of_connection("max_xmit_dlength"),
            Tunable::QueueDepth => below(format!("bus/scsi/devices/{device}"), "queue_depth"),
            Tunable::CommandsMax => {
                below(format!("class/scsi_host/host{}", device.host), "can_queue")
            }
        };
        let value: u32 = text?.parse().ok()?;
        Some(match tunable {
            Tunable::CommandsMax => value.saturating_add(KEPT_BY_THE_KERNEL),
            _ => value,
        })
    }
}

/// The value of a digest (RFC 7143, 13.1) for what the kernel shows.
fn digest_name(shown: &str) -> String {
    match shown {
        "0" => "None".to_owned(),
        "1" => "CRC32C".to_owned(),
        other => other.to_owned(),
    }
}

/// The text; `None` if it is what the kernel prints for no value.
pub(super) fn non_null(text: impl AsRef<str>) -> Option<String> {
    let text = text.as_ref().trim();
    let is_none = matches!(text, "" | "(null)" | "<NULL>");
    (!is_none).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::time::Duration;

    use super::*;
    use crate::id::SessionId;
    use crate::iscsi::{Credentials, Secret, Tunables};

    #[test]
    fn a_setting_that_the_kernel_does_not_show_as_it_was_chosen_is_named_with_both_values() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let device = roots.sysfs.join("devices/platform/host3/session4");
        let session = device.join("iscsi_session/session4");
        let connection = device.join("connection4:0");
        let host = roots.sysfs.join("devices/platform/host3/iscsi_host/host3");
        let scsi_host = roots.sysfs.join("class/scsi_host/host3");
        let unit = roots.sysfs.join("bus/scsi/devices/3:0:0:7");
        for (dir, name, value) in [
            (&session, "abort_tmo", "15"),
            (&session, "recovery_tmo", "5"),
            (&connection, "header_digest", "1"),
            (&connection, "data_digest", "0"),
            (&host, "netdev", "(null)"),
            (&host, "ipaddress", "10.0.0.5"),
            (&scsi_host, "can_queue", "113"),
            (&unit, "queue_depth", "32"),
        ] {
            fs::create_dir_all(dir).unwrap();
            fs::write(dir.join(name), format!("{value}\n")).unwrap();
        }
        for (kind, name, dir) in [
            ("session", "session4", &session),
            ("connection", "connection4:0", &connection),
        ] {
            let class = roots.sysfs.join(format!("class/iscsi_{kind}"));
            fs::create_dir_all(&class).unwrap();
            symlink(dir, class.join(name)).unwrap();
        }
        let [own, its] = ["one", "other"].map(|secret| Secret::new(secret).unwrap());
        let mutual = Credentials::new("host", own).unwrap().mutual(None, its);
        let mut tunables = Tunables::default();
        for (tunable, value) in [
            (Tunable::AbortTimeout, 15),
            (Tunable::CommandsMax, 128),
            (Tunable::QueueDepth, 64),
            (Tunable::NopTimeout, 9),
        ] {
            tunables.set(tunable, value).unwrap();
        }
        let options = SessionOptions::new("iqn.2026-01.example:host".parse().unwrap())
            .tunables(tunables)
            .recovery_timeout(Duration::from_secs(120))
            .require_digests()
            .credentials(mutual.unwrap())
            .interface("eth0".parse().unwrap())
            .source_address("10.0.0.5".parse().unwrap());
        let session = IscsiSession::new(&roots, SessionId(4));
        let unmet = session.unmet(&roots, &options, "3:0:0:7".parse().unwrap());
        let said: Vec<String> = unmet.iter().map(ToString::to_string).collect();
        assert_eq!(
            said,
            [
                "nop_timeout is not known, and not 9 for certain",
                "queue_depth is 32, not 64",
                "recovery_timeout is 5, not 120",
                "data_digest is None, not CRC32C",
                "require_digests is false, not true",
                "proof is not known, and not mutual CHAP for certain",
                "interface is not known, and not eth0 for certain",
            ]
        );
    }
}
