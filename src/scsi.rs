//! One SCSI logical unit, one attempt, verified by reading back.

mod delete;
mod device;
mod identity;
mod probe;
mod scan;

pub(crate) use delete::delete;
pub use device::ScsiDevice;
pub(crate) use device::require_host;
pub use identity::Identity;
pub(crate) use identity::read_identity;
pub(crate) use probe::wait_for_disk;
pub(crate) use scan::scan;
