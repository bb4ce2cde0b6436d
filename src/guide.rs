//! The guide: how each part works, and what to do when something fails.
//!
//!  page | topics |
//! |---|---|
//! | [`concepts`] | identity, "settled", deadlines, quarantine, the receipt |
//! | [`scsi`] | one attach and one detach, step by step |
//! | [`iscsi`] | login, recovery and logout without a daemon |
//! | [`fibre_channel`] | sources that name target ports |
//! | [`multipath`] | how a map comes and goes |
//! | [`nbd`] | connections, timeouts, reconnect |
//! | [`journal`] | volumes by name, and what happens after a crash |
//! | [`reconciler`] | many volumes, kept as a file or an agent wants them |
//! | [`json`] | what the command prints with `--json` |
//! | [`containers`] | what a container must be given |
//! | [`troubleshooting`] | each kind of error, and what to do |

#[doc = include_str!("guide/concepts.md")]
pub mod concepts {}

#[doc = include_str!("guide/scsi.md")]
pub mod scsi {}

#[doc = include_str!("guide/iscsi.md")]
pub mod iscsi {}

#[doc = include_str!("guide/fibre_channel.md")]
pub mod fibre_channel {}

#[doc = include_str!("guide/multipath.md")]
pub mod multipath {}

#[doc = include_str!("guide/nbd.md")]
pub mod nbd {}

#[doc = include_str!("guide/journal.md")]
pub mod journal {}

#[doc = include_str!("guide/reconciler.md")]
pub mod reconciler {}

#[doc = include_str!("guide/json.md")]
pub mod json {}

#[doc = include_str!("guide/containers.md")]
pub mod containers {}

#[doc = include_str!("guide/troubleshooting.md")]
pub mod troubleshooting {}
