//! The calls of [`Engine`]: this layer alone combines the layers below it. Start reading
//! at [`attach`](Engine::attach). Only calls from outside are methods of `Engine`. Each step of
//! a call is a function of its module, so a module's imports show on which steps it depends.

mod attach;
mod call;
#[cfg(feature = "journal")]
mod change_events;
mod detach;
mod first_names;
mod inventory;
mod iscsi;
#[cfg(feature = "journal")]
pub mod journal;
mod lock;
mod nbd;
mod preflight;
mod resize;
mod stale;
mod state;
mod telemetry;
mod timing;
#[cfg(feature = "journal")]
mod transports;
mod unit;
mod usage;
#[cfg(feature = "journal")]
mod volume;

pub use attach::nbd_options::NbdOptions;
pub use attach::{AttachRequest, Attachment, MissingPath, Multipath, Unit, UnitPath};
#[cfg(feature = "journal")]
pub use change_events::{ChangeEvent, ChangeListener};
pub use detach::receipt::{DetachFailure, Flush, MapReceipt, PathReceipt, Receipt};
pub use detach::{DetachRequest, DetachTarget, Detachment, Place};
pub use inventory::capacity::{Capacity, FileSystem};
pub use inventory::{
    Inventory, InventoryMap, InventoryPath, InventoryUnit, NbdUnit, ScsiUnit, UnitKind,
};
pub use iscsi::recovery::{
    SessionRecovery, SessionRecoveryOptions, SessionRecoveryOutcome, SessionRecoveryReport,
    SessionRecoveryStop,
};
#[cfg(feature = "journal")]
pub use journal::Journal;
pub use nbd::heal::{Healer, ReconnectHandle};
pub use nbd::outcome::{HealOutcome, HealReport};
pub use preflight::{Check, Finding};
pub use resize::{ResizeRequest, Resized};
pub use stale::{Evidence, ReapOutcome, ReapReport, ReapRequest, StaleLun, Unproven};
pub use state::Engine;
pub use timing::{Phase, StageObserver};
#[cfg(feature = "journal")]
pub(crate) use transports::{ScsiTransport, ScsiTransports};
pub use usage::{Holder, NotLookedAt};
#[cfg(feature = "journal")]
pub use volume::DetachVolume;
#[cfg(feature = "journal")]
pub use volume::recover::{Action, Condition, Foreign, Recovered, Recovery, VolumeStatus};
