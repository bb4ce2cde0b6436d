//! placeholder
pub mod deadline;
pub mod engine;
pub mod error;
pub mod id;
pub mod kernel;
pub mod scsi;
pub mod uevent;

pub use deadline::Deadline;
pub use engine::{AttachRequest, Attachment, DetachTarget, Detachment, Engine};
pub use error::{Error, ErrorKind, Result};
pub use id::Source;
pub use kernel::Roots;
