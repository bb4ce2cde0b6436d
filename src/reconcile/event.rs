//! What happened to a volume.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::plan::StepKind;
use crate::engine::SessionRecoveryReport;
use crate::error::Error;
use crate::id::VolumeId;
use crate::nbd::ServerCertificate;

/// What happened to a volume.
#[derive(Debug, Clone, serde::Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Event {
    /// It is attached, and what was handed out was read back.
    Attached {
        /// The volume.
        volume: VolumeId,
        /// The device.
        node: PathBuf,
        /// Its size in bytes.
        size: u64,
    },
    /// It has another size, which was read back: as large as it is wanted.
    Resized {
        /// The volume.
        volume: VolumeId,
        /// Its size in bytes before.
        old_size: u64,
        /// Its size in bytes.
        size: u64,
    },
    /// It was attached and is otherwise now: another device, other paths.
    Changed {
        /// The volume.
        volume: VolumeId,
        /// The device.
        node: PathBuf,
        /// The paths that lead to a SCSI unit.
        paths: usize,
        /// Those that its sources name and that do not.
        missing: Vec<String>,
    },
    /// Nothing of it is left on this machine.
    Detached {
        /// The volume.
        volume: VolumeId,
        /// All that was written to it was proven to be on the array or server:
        /// see [`Detachment::safe_to_unmap`](crate::Detachment::safe_to_unmap).
        safe_to_unmap: bool,
    },
    /// A step failed.
    Failed {
        /// The volume.
        volume: VolumeId,
        /// What was tried.
        step: StepKind,
        /// Why it failed.
        #[serde(serialize_with = "shared")]
        error: Arc<Error>,
        /// In how long it is tried again; `None` where that is not before
        /// something changes. Seconds when serialised.
        #[serde(rename = "next_try_seconds", serialize_with = "as_seconds")]
        next_try: Option<Duration>,
    },
    /// It stands and does not serve.
    Lost {
        /// The volume.
        volume: VolumeId,
        /// Why, in words.
        why: String,
        /// How long requests to an NBD device wait before they fail with `EIO`,
        /// from the death of its link on; `None` where nobody saw when that was.
        /// Seconds when serialised.
        #[serde(rename = "budget_left_seconds", serialize_with = "as_seconds")]
        budget_left: Option<Duration>,
    },
    /// The certificate of an NBD volume's server ends within 30 days, or has ended: the next
    /// reconnect after its end fails. Said once for each certificate.
    CertificateEnds {
        /// The volume.
        volume: VolumeId,
        /// The certificate that the server showed at the last connect.
        certificate: ServerCertificate,
    },
    /// It serves again.
    Healed {
        /// The volume.
        volume: VolumeId,
    },
    /// An iSCSI session that was made here was lost, or serves again.
    Session(#[serde(serialize_with = "shared")] Arc<SessionRecoveryReport>),
    /// This many events were lost, since they were not read in time.
    Missed {
        /// How many.
        count: u64,
    },
}

#[expect(clippy::ref_option, reason = "serde's signature")]
fn as_seconds<S: serde::Serializer>(
    time: &Option<Duration>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serde::Serialize::serialize(&time.map(|time| time.as_secs_f64()), serializer)
}

fn shared<T: serde::Serialize, S: serde::Serializer>(
    of: &Arc<T>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    T::serialize(of, serializer)
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Attached { volume, node, size } => {
                write!(f, "{volume}: attached as {}, {size} bytes", node.display())
            }
            Self::Resized {
                volume,
                old_size,
                size,
            } => write!(f, "{volume}: has {size} bytes, {old_size} before"),
            Self::Changed {
                volume,
                node,
                paths,
                missing,
            } => {
                write!(f, "{volume}: is {} now, {paths} paths", node.display())?;
                missing
                    .iter()
                    .try_for_each(|path| write!(f, "; missing {path}"))
            }
            Self::Detached {
                volume,
                safe_to_unmap: true,
            } => write!(f, "{volume}: detached, all was written back"),
            Self::Detached { volume, .. } => write!(f, "{volume}: detached"),
            Self::Failed {
                volume,
                step,
                error,
                next_try,
            } => {
                write!(f, "{volume}: {step} failed: {error:#}")?;
                match next_try {
                    Some(wait) => write!(f, "; again in {:.1} s", wait.as_secs_f64()),
                    None => f.write_str("; not again before something changes"),
                }
            }
            Self::Lost {
                volume,
                why,
                budget_left,
            } => {
                write!(f, "{volume}: does not serve: {why}")?;
                budget_left.map_or(Ok(()), |left| {
                    write!(f, "; I/O waits {:.0} s more", left.as_secs_f64())
                })
            }
            Self::CertificateEnds {
                volume,
                certificate:
                    ServerCertificate {
                        subject,
                        valid_until,
                    },
            } => {
                let end = humantime::format_rfc3339_seconds(*valid_until);
                write!(
                    f,
                    "{volume}: the server's certificate ({subject}) ends at {end}: renew it, or the \
                     next reconnect fails"
                )
            }
            Self::Healed { volume } => write!(f, "{volume}: serves again"),
            Self::Session(kept) => kept.fmt(f),
            Self::Missed { count } => write!(f, "{count} events were missed"),
        }
    }
}
