//! What the kernel is told of a session.

use std::time::Duration;

use super::SessionName;
use crate::error::Result;
use crate::id::SessionId;
use crate::iscsi::login::Connection;
use crate::iscsi::tunables::{Tunable, Tunables};
use crate::kernel::iscsi_netlink::{Control, Param};

/// What a session's interface is called: the kernel keeps it with the session,
/// and so says whose it is.
pub(super) const INTERFACE: &str = "lunbd";
/// What the kernel keeps in the place of our user name with a session that is not to be
/// without digests.
pub(super) const REQUIRES_DIGESTS: &str = "lunbd:digests-required";
/// How long I/O waits for a lost session where nobody chose, as iscsid has it.
pub(super) const RECOVERY: Duration = Duration::from_secs(120);

/// How a session is made, as far as a login again does not change it.
pub(in crate::iscsi) struct Made<'a> {
    pub(super) recovery: Duration,
    pub(super) tunables: &'a Tunables,
}

impl Made<'_> {
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

/// What a connection is given each time that it is bound, as iscsid gives it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::iscsi) struct Settings(Vec<(Param, String)>);

impl Settings {
    /// All that was negotiated (RFC 7143, 13), the names, and the times of `made`; without
    /// it the session keeps its own, as one that is logged in again. No user's name and
    /// no secret: sysfs would show them. In the place of the target's user name is the
    /// [mark](crate::iscsi::Proven::mark) of how the sides proved themselves.
    pub(in crate::iscsi) fn of(
        name: &SessionName,
        connection: &Connection,
        made: Option<&Made<'_>>,
    ) -> Self {
        let agreed = &connection.session.parameters;
        let flag = |yes: bool| u8::from(yes).to_string();
        // First, so that one that has any of its names shows that it is ours, and how
        // its sides proved themselves.
        let mut all = vec![(Param::InterfaceName, INTERFACE.to_owned())];
        let mark = connection.session.proven.mark();
        all.extend(mark.map(|mark| (Param::UsernameIn, mark.to_owned())));
        if connection.session.requires_digests {
            all.push((Param::Username, REQUIRES_DIGESTS.to_owned()));
        }
        // Before the names, by which a session is found that was never started.
        all.extend(made.iter().flat_map(|made| made.times()));
        all.extend([
            (Param::TargetName, name.target.to_string()),
            (Param::InitiatorName, name.initiator.to_string()),
            // The portal that was asked: a redirect is a matter of one login. udev
            // makes the names below by-path of it.
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

    /// Tells the kernel, of a connection that is bound. **Blocks.**
    pub(in crate::iscsi) fn set(&self, control: &mut Control, session: SessionId) -> Result<()> {
        let mut each = self.0.iter();
        each.try_for_each(|(param, value)| control.set(session, *param, value))
    }
}
