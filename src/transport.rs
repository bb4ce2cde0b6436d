//! Finds the SCSI host, channel and target of an iSCSI portal or a Fibre Channel port on
//! this machine, as sysfs shows it now. It logs in, scans and writes nothing.
//!
//! A problem of one path is reported for that path and never stops another: a session or a
//! port that cannot be used or read is a [`RouteUnavailable`].

mod fc;
mod iscsi;
mod route;
mod target_port;
mod transport_info;

pub use crate::id::RouteKind;
pub use fc::fc_routes;
pub use iscsi::iscsi_routes;
pub use route::{MissingReason, Route, RouteUnavailable};
pub(crate) use target_port::TargetPort;
pub(crate) use transport_info::TransportReader;
pub use transport_info::{TransportInfo, transport_of};
