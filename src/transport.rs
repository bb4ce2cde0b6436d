//! Which SCSI host, channel and target an iSCSI portal or a Fibre Channel port
//! is on this machine, as sysfs shows it now. Nothing is logged in, scanned or
//! written.
//!
//! What is wrong with one path is said of that path and never stops another: a
//! session or a port that cannot be used, or cannot be read, is a [`RouteUnavailable`].

mod fc;
mod iscsi;
mod reach;
mod route;
mod target_port;

pub use fc::fc_routes;
pub use iscsi::iscsi_routes;
pub(crate) use reach::TransportReader;
pub use reach::{TransportInfo, reach};
pub use route::{MissingReason, Route, RouteKind, RouteUnavailable};
pub(crate) use target_port::TargetPort;
