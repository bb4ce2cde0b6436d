//! The parameters of a session that the kernel stores.

use std::time::Duration;

use super::SessionName;
use crate::error::Result;
use crate::id::SessionId;
use crate::iscsi::login::Connection;
use crate::iscsi::tunables::{Tunable, Tunables};
use crate::kernel::iscsi_netlink::{Control, Param};

/// The name of a session's interface. The kernel stores it with the session, so it marks
/// the sessions of lunbd.
pub(super) const INTERFACE: &str = "lunbd";
/// The text that the kernel stores in the field of our user name, for a session that must
/// have digests.
pub(super) const REQUIRES_DIGESTS: &str = "lunbd:digests-required";
/// The default recovery timeout, which is iscsid's: how long I/O waits for a lost session.
pub(super) const RECOVERY: Duration = Duration::from_secs(120);

/// The settings of a new session that a later login does not change.
pub(in crate::iscsi) struct NewSessionSettings<'a> {
    pub(super) recovery: Duration,
    pub(super) tunables: &'a Tunables,
}

impl NewSessionSettings<'_> {
    fn times(&self) -> [(Param, String); 6] {
        let tuned = |param, tunable| (param, self.tunables.value(tunable).to_string());
        [
            tuned(Param::AbortTimeout, Tunable::AbortTimeout),
            tuned(Param::LuResetTimeout, Tunable::LuResetTimeout),
            tuned(Param::TargetResetTimeout, Tunable::TargetResetTimeout),
            tuned(Param::PingTimeout, Tunable::NopTimeout),
            tuned(Param::ReceiveTimeout, Tunable::NopInterval),
            (Param::RecoveryTimeout, self.recovery.as_secs().to_string()),
        ]
    }
}

/// The parameters that a connection gets at each bind, as iscsid sets them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::iscsi) struct Settings(Vec<(Param, String)>);

impl Settings {
    /// All negotiated parameters (RFC 7143, 13), the names, and the times of `new_session`.
    /// Without it the session keeps its times, as at another login. User names and
    /// secrets are left out, because sysfs would show them. The field of the target's user
    /// name holds the [mark](crate::iscsi::Proven::mark) of how the sides proved
    /// themselves.
    pub(in crate::iscsi) fn of(
        name: &SessionName,
        connection: &Connection,
        new_session: Option<&NewSessionSettings<'_>>,
    ) -> Self {
        let agreed = &connection.session.parameters;
        let flag = |yes: bool| u8::from(yes).to_string();
        // These come first, so that a session with any of its names already shows that
        // lunbd made it and how its sides proved themselves.
        let mut all = vec![(Param::InterfaceName, INTERFACE.to_owned())];
        let mark = connection.session.proven.mark();
        all.extend(mark.map(|mark| (Param::UsernameIn, mark.to_owned())));
        if connection.session.requires_digests {
            all.push((Param::Username, REQUIRES_DIGESTS.to_owned()));
        }
        // The times come before the names, by which a session that was never started is
        // found.
        all.extend(new_session.iter().flat_map(|settings| settings.times()));
        all.extend([
            (Param::TargetName, name.target.to_string()),
            (Param::InitiatorName, name.initiator.to_string()),
            // The portal that was asked, because a redirect counts for one login only. udev
            // makes the by-path names of it.
            (Param::PersistentAddress, name.portal.host().to_string()),
            (Param::PersistentPort, name.portal.port().to_string()),
            (Param::HeaderDigest, flag(agreed.header_digest)),
            (Param::DataDigest, flag(agreed.data_digest)),
            (
                Param::MaxRecvDlength,
                agreed.max_recv_data_segment_length.to_string(),
            ),
            (
                Param::MaxXmitDlength,
                agreed.max_xmit_data_segment_length.to_string(),
            ),
            (Param::InitialR2t, flag(agreed.initial_r2t)),
            (Param::ImmediateData, flag(agreed.immediate_data)),
            (Param::FirstBurst, agreed.first_burst_length.to_string()),
            (Param::MaxBurst, agreed.max_burst_length.to_string()),
            (Param::MaxR2t, agreed.max_outstanding_r2t.to_string()),
            (Param::PduInOrder, flag(agreed.data_pdu_in_order)),
            (
                Param::DataSequenceInOrder,
                flag(agreed.data_sequence_in_order),
            ),
            (
                Param::ErrorRecoveryLevel,
                agreed.error_recovery_level.to_string(),
            ),
            (Param::ExpStatSn, connection.session.exp_stat_sn.to_string()),
            (Param::FastAbort, flag(true)),
        ]);
        let group = connection.session.group;
        all.extend(group.map(|tag| (Param::PortalGroup, tag.to_string())));
        Self(all)
    }

    /// Sets the parameters of a bound connection in the kernel. **Blocks.**
    pub(in crate::iscsi) fn set(&self, control: &mut Control, session: SessionId) -> Result<()> {
        let mut each = self.0.iter();
        each.try_for_each(|(param, value)| control.set(session, *param, value))
    }
}
