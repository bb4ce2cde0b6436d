//! The settings of a session that array vendors prescribe.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::str::FromStr;

use crate::error::{Error, ErrorKind, Result};

/// One setting of a session. Its default is iscsid's.
///
/// | name | iscsid's name | default | limits |
/// |---|---|---|---|
/// | `nop_interval` | `node.conn[0].timeo.noop_out_interval` | 5 | 0 to 3600 s |
/// | `nop_timeout` | `node.conn[0].timeo.noop_out_timeout` | 5 | 0 to 3600 s |
/// | `queue_depth` | `node.session.queue_depth` | 32 | 1 to 1024 |
/// | `commands_max` | `node.session.cmds_max` | 128 | 16 to 4096, a power of 2 |
/// | `abort_timeout` | `node.session.err_timeo.abort_timeout` | 15 | 1 to 3600 s |
/// | `lu_reset_timeout` | `node.session.err_timeo.lu_reset_timeout` | 30 | 1 to 3600 s |
/// | `target_reset_timeout` | `node.session.err_timeo.tgt_reset_timeout` | 30 | 1 to 3600 s |
/// | `first_burst` | `node.session.iscsi.FirstBurstLength` | 262144 | 512 to 16777215 bytes |
/// | `max_burst` | `node.session.iscsi.MaxBurstLength` | 16773120 | 512 to 16777215 bytes |
/// | `receive_segment` | `node.conn[0].iscsi.MaxRecvDataSegmentLength` | 262144 | 512 to 16777215 bytes |
/// | `send_segment` | `node.conn[0].iscsi.MaxXmitDataSegmentLength` | what the target takes | 512 to 16777215 bytes |
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, strum::Display, strum::IntoStaticStr,
)]
#[strum(serialize_all = "snake_case")]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Tunable {
    /// The kernel pings an idle connection after so many seconds; 0 pings never.
    NopInterval,
    /// The connection is lost if the target answers no ping for so many seconds; 0 pings
    /// never.
    NopTimeout,
    /// How many commands one unit may have at once.
    QueueDepth,
    /// How many commands the session may have at once; the kernel keeps 15 of them for
    /// itself.
    CommandsMax,
    /// How many seconds the kernel waits for the abort of a command.
    AbortTimeout,
    /// How many seconds the kernel waits for the reset of a unit.
    LuResetTimeout,
    /// How many seconds the kernel waits for the reset of the target.
    TargetResetTimeout,
    /// The most unsolicited data of one write, in bytes. The target may accept less.
    FirstBurst,
    /// The most data of one burst, in bytes. The target may accept less.
    MaxBurst,
    /// The most data that we receive in one PDU, in bytes.
    ReceiveSegment,
    /// The most data that we send in one PDU, in bytes. The target may accept less.
    SendSegment,
}

/// The part of `commands_max` that the kernel keeps for pings and task management
/// (`ISCSI_MGMT_CMDS_MAX` of `include/scsi/libiscsi.h`).
pub(super) const KEPT_BY_THE_KERNEL: u32 = 15;

impl Tunable {
    /// All settings, in the order of the table.
    pub const ALL: [Self; 11] = [
        Self::NopInterval,
        Self::NopTimeout,
        Self::QueueDepth,
        Self::CommandsMax,
        Self::AbortTimeout,
        Self::LuResetTimeout,
        Self::TargetResetTimeout,
        Self::FirstBurst,
        Self::MaxBurst,
        Self::ReceiveSegment,
        Self::SendSegment,
    ];

    /// The name, as [`FromStr`] reads it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// The valid values.
    #[must_use]
    pub fn limits(self) -> RangeInclusive<u32> {
        match self {
            Self::NopInterval | Self::NopTimeout => 0..=3600,
            // The limits of scsi_mod (`scsi_device_max_queue_depth`).
            Self::QueueDepth => 1..=1024,
            // `ISCSI_TOTAL_CMDS_MIN` and `ISCSI_TOTAL_CMDS_MAX`.
            Self::CommandsMax => 16..=4096,
            Self::AbortTimeout | Self::LuResetTimeout | Self::TargetResetTimeout => 1..=3600,
            // RFC 7143, 13.12 to 13.14.
            Self::FirstBurst | Self::MaxBurst | Self::ReceiveSegment | Self::SendSegment => {
                512..=0x00ff_ffff
            }
        }
    }

    fn default_value(self) -> u32 {
        match self {
            Self::NopInterval | Self::NopTimeout => 5,
            Self::QueueDepth => 32,
            Self::CommandsMax => 128,
            Self::AbortTimeout => 15,
            Self::LuResetTimeout | Self::TargetResetTimeout => 30,
            Self::FirstBurst | Self::ReceiveSegment => 262_144,
            Self::MaxBurst => 0x00ff_f000,
            Self::SendSegment => 0x00ff_ffff,
        }
    }

    /// # Errors
    /// `InvalidInput`, naming the limits.
    fn check(self, value: u32) -> Result<()> {
        let limits = self.limits();
        let wants_power = self == Self::CommandsMax;
        if limits.contains(&value) && (!wants_power || value.is_power_of_two()) {
            return Ok(());
        }
        let (least, most) = (limits.start(), limits.end());
        let power = if wants_power { " and a power of 2" } else { "" };
        let message = format!("{self}={value} is refused: it must be {least} to {most}{power}");
        Err(Error::new(ErrorKind::InvalidInput, message))
    }
}

impl FromStr for Tunable {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let known = Self::ALL.into_iter().find(|one| one.as_str() == text);
        known.ok_or_else(|| {
            let names = Self::ALL.map(Self::as_str).join(", ");
            let message = format!("{text:?} is no setting of a session: expected one of {names}");
            Error::new(ErrorKind::InvalidInput, message)
        })
    }
}

/// The settings of a session that a caller chose. All others have their default.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "BTreeMap<Tunable, u32>"))]
pub struct Tunables(BTreeMap<Tunable, u32>);

impl Tunables {
    /// Chooses the value of one setting; the last choice counts.
    ///
    /// # Errors
    /// `InvalidInput` for an invalid value, naming the setting's limits.
    pub fn set(&mut self, tunable: Tunable, value: u32) -> Result<()> {
        tunable.check(value)?;
        self.0.insert(tunable, value);
        Ok(())
    }

    /// The chosen value of a setting.
    #[must_use]
    pub fn chosen(&self, tunable: Tunable) -> Option<u32> {
        self.0.get(&tunable).copied()
    }

    /// Whether no setting is chosen.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The chosen settings, in the order of [`Tunable::ALL`].
    pub fn iter(&self) -> impl Iterator<Item = (Tunable, u32)> {
        self.0.iter().map(|(tunable, value)| (*tunable, *value))
    }

    /// The value that a session gets. A setting that is not chosen follows the chosen
    /// settings with which it must agree.
    #[must_use]
    pub fn value(&self, tunable: Tunable) -> u32 {
        if let Some(value) = self.chosen(tunable) {
            return value;
        }
        let default = tunable.default_value();
        let chosen = |other| self.chosen(other);
        match tunable {
            // The kernel pings only if both are set, and replaces a single 0 by 5.
            Tunable::NopInterval if chosen(Tunable::NopTimeout) == Some(0) => 0,
            Tunable::NopTimeout if chosen(Tunable::NopInterval) == Some(0) => 0,
            Tunable::QueueDepth => default.min(self.max_commands_of_one_unit()),
            Tunable::FirstBurst => default.min(self.value_of_max_burst()),
            Tunable::MaxBurst => self.value_of_max_burst(),
            _ => default,
        }
    }

    fn value_of_max_burst(&self) -> u32 {
        let default = Tunable::MaxBurst.default_value();
        let first = self.chosen(Tunable::FirstBurst).unwrap_or(0);
        let chosen = self.chosen(Tunable::MaxBurst);
        chosen.unwrap_or_else(|| default.max(first))
    }

    fn max_commands_of_one_unit(&self) -> u32 {
        let all = self.value(Tunable::CommandsMax);
        all.saturating_sub(KEPT_BY_THE_KERNEL)
    }

    /// # Errors
    /// `InvalidInput` for settings that contradict each other, naming both.
    pub(super) fn require_valid(&self) -> Result<()> {
        let value = |tunable| self.value(tunable);
        let (interval, timeout) = (value(Tunable::NopInterval), value(Tunable::NopTimeout));
        let (first, max) = (value(Tunable::FirstBurst), value(Tunable::MaxBurst));
        let (depth, most) = (value(Tunable::QueueDepth), self.max_commands_of_one_unit());
        let message = if (interval == 0) != (timeout == 0) {
            format!(
                "nop_interval={interval} with nop_timeout={timeout} is refused: both are 0, \
                 which pings never, or none is"
            )
        } else if first > max {
            format!("first_burst={first} is refused: it must be at most max_burst, {max}")
        } else if depth > most {
            let all = value(Tunable::CommandsMax);
            format!(
                "queue_depth={depth} is refused: it must be at most {most}, which is \
                 commands_max, {all}, without the {KEPT_BY_THE_KERNEL} that the kernel keeps"
            )
        } else {
            return Ok(());
        };
        Err(Error::new(ErrorKind::InvalidInput, message))
    }
}

impl TryFrom<BTreeMap<Tunable, u32>> for Tunables {
    type Error = Error;

    fn try_from(values: BTreeMap<Tunable, u32>) -> Result<Self> {
        let mut tunables = Self::default();
        for (tunable, value) in values {
            tunables.set(tunable, value)?;
        }
        Ok(tunables)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tuned(values: &[(Tunable, u32)]) -> Tunables {
        let mut tunables = Tunables::default();
        for (tunable, value) in values {
            tunables.set(*tunable, *value).unwrap();
        }
        tunables
    }

    #[test]
    fn each_setting_is_read_by_its_name_and_refused_outside_of_its_limits() {
        for tunable in Tunable::ALL {
            assert_eq!(tunable.as_str().parse::<Tunable>().unwrap(), tunable);
            let (least, most) = tunable.limits().into_inner();
            let mut tunables = Tunables::default();
            for value in [least, most, tunable.default_value()] {
                tunables.set(tunable, value).unwrap();
                assert_eq!(tunables.value(tunable), value);
            }
            for value in [least.checked_sub(1), Some(most + 1)].into_iter().flatten() {
                let error = tunables.set(tunable, value).unwrap_err().to_string();
                assert!(error.contains(tunable.as_str()), "{error}");
                let limits = format!("{least} to {most}");
                assert!(error.contains(&limits), "{error}");
            }
        }
        let error = "depth".parse::<Tunable>().unwrap_err().to_string();
        assert!(error.contains("queue_depth"), "{error}");
        let error = tuned(&[]).set(Tunable::CommandsMax, 100).unwrap_err();
        assert!(error.to_string().contains("power of 2"), "{error}");
    }

    #[test]
    fn settings_that_contradict_each_other_are_refused_and_those_unchosen_follow() {
        use Tunable::{CommandsMax, FirstBurst, MaxBurst, NopInterval, NopTimeout, QueueDepth};
        for (values, names) in [
            ([(NopInterval, 0), (NopTimeout, 5)], "nop_timeout"),
            ([(NopInterval, 5), (NopTimeout, 0)], "nop_interval"),
            ([(FirstBurst, 8192), (MaxBurst, 4096)], "max_burst"),
            ([(CommandsMax, 128), (QueueDepth, 114)], "commands_max"),
        ] {
            let error = tuned(&values).require_valid().unwrap_err().to_string();
            assert!(error.contains(names), "{error}");
        }
        for (value, other, follows) in [
            ((NopInterval, 0), NopTimeout, 0),
            ((NopTimeout, 0), NopInterval, 0),
            ((MaxBurst, 4096), FirstBurst, 4096),
            ((FirstBurst, 0x00ff_ffff), MaxBurst, 0x00ff_ffff),
            ((CommandsMax, 16), QueueDepth, 1),
            ((CommandsMax, 1024), QueueDepth, 32),
        ] {
            let tunables = tuned(&[value]);
            tunables.require_valid().unwrap();
            assert_eq!(tunables.value(other), follows, "{value:?}");
        }
    }

    #[test]
    fn what_is_not_chosen_is_what_a_login_offers_without_settings() {
        let (offer, none) = (crate::iscsi::Parameters::offer(), Tunables::default());
        let offered = [
            (Tunable::FirstBurst, offer.first_burst_length),
            (Tunable::MaxBurst, offer.max_burst_length),
            (Tunable::ReceiveSegment, offer.max_recv_data_segment_length),
        ];
        for (tunable, value) in offered {
            assert_eq!(none.value(tunable), value);
        }
        none.require_valid().unwrap();
    }
}
