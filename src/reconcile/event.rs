//! The events of a reconciler.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::step::StepKind;
use crate::engine::SessionRecoveryReport;
use crate::error::Error;
use crate::id::{ContentName, VolumeId};
use crate::nbd::{ServerCertificate, describe_content_names};

/// An event of a volume or of an iSCSI session.
#[derive(Debug, Clone, serde::Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Event {
    /// The volume is attached, and the device was read back.
    Attached {
        /// The volume.
        volume: VolumeId,
        /// The device.
        node: PathBuf,
        /// Its size in bytes.
        size: u64,
    },
    /// The volume has another size, which was read back and is large enough.
    Resized {
        /// The volume.
        volume: VolumeId,
        /// Its size in bytes before.
        old_size: u64,
        /// Its size in bytes now.
        size: u64,
    },
    /// An attached volume changed: it has another device or other paths.
    Changed {
        /// The volume.
        volume: VolumeId,
        /// The device.
        node: PathBuf,
        /// The number of its SCSI paths.
        paths: usize,
        /// The paths that its sources name and that are missing.
        missing: Vec<String>,
    },
    /// Nothing of the volume is left on this machine.
    Detached {
        /// The volume.
        volume: VolumeId,
        /// Whether all data written to it was proven to be on the array or server: see
        /// [`Detachment::safe_to_unmap`](crate::Detachment::safe_to_unmap).
        safe_to_unmap: bool,
    },
    /// A step failed.
    Failed {
        /// The volume.
        volume: VolumeId,
        /// The failed step.
        step: StepKind,
        /// Why it failed.
        #[serde(serialize_with = "shared")]
        error: Arc<Error>,
        /// The time until the next attempt; `None` where it waits for a change.
        /// Serialised in seconds.
        #[serde(
            rename = "next_try_seconds",
            serialize_with = "crate::deadline::as_seconds"
        )]
        next_try: Option<Duration>,
    },
    /// The volume is attached and does not serve I/O.
    Lost {
        /// The volume.
        volume: VolumeId,
        /// Why, in words.
        why: String,
        /// How long requests to an NBD device wait, from the death of its link, before
        /// they fail with `EIO`; `None` where the time of the death is unknown.
        /// Serialised in seconds.
        #[serde(
            rename = "budget_left_seconds",
            serialize_with = "crate::deadline::as_seconds"
        )]
        budget_left: Option<Duration>,
    },
    /// The certificate of an NBD volume's server ends within 30 days, or has ended: the next
    /// reconnect after its end fails. Reported once for each certificate.
    CertificateEnds {
        /// The volume.
        volume: VolumeId,
        /// The certificate that the server showed at the last connect.
        certificate: ServerCertificate,
    },
    /// A heal took a server whose content has other names than the volume had: it may be
    /// another volume, or it was written meanwhile.
    ContentDiffers {
        /// The volume.
        volume: VolumeId,
        /// The names that it had when it was read last.
        from: Vec<ContentName>,
        /// The names that the server has now; none if it has none that is known.
        to: Vec<ContentName>,
    },
    /// The volume serves I/O again.
    Healed {
        /// The volume.
        volume: VolumeId,
    },
    /// An iSCSI session of lunbd was lost, or serves I/O again.
    Session(#[serde(serialize_with = "shared")] Arc<SessionRecoveryReport>),
    /// This many events were dropped, since the follower did not read them in time.
    Missed {
        /// The number of dropped events.
        count: u64,
    },
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
                    None => {
                        f.write_str("; again after a change or at the next refresh of all volumes")
                    }
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
            Self::ContentDiffers { volume, from, to } => {
                let (from, to) = (describe_content_names(from), describe_content_names(to));
                write!(
                    f,
                    "{volume}: its server has content with {to} instead of {from}: check that it \
                     is the volume"
                )
            }
            Self::Healed { volume } => write!(f, "{volume}: serves again"),
            Self::Session(report) => report.fmt(f),
            Self::Missed { count } => write!(f, "{count} events were missed"),
        }
    }
}
