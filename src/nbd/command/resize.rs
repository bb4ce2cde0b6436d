//! The command that tells the kernel the size of a connected device.

use lunbd_sys::nbd as abi;

use super::{backend_attribute, exchange};
use crate::crash::crash_point;
use crate::deadline::Deadline;
use crate::error::{Result, Stage};
use crate::id::{BackendId, NbdIndex};
use crate::kernel::Roots;
use crate::nbd::message::{Attribute, Message};
use crate::nbd::refusal::RefusedCommand;

/// Changes only the size, in bytes, of a connected device with this backend id
/// (`NBD_CMD_RECONFIGURE` with a size, Linux 5.4). Its connections and timeouts stay.
///
/// Prove first that the device answers a read. Newer kernels (6.12) hold its I/O while
/// they change the size. Inside this command, under the lock of all generic netlink,
/// they wait for the requests in flight. If a server dies in that moment, it can be
/// replaced only after those requests have failed.
///
/// # Errors
/// Those of [`Reconfigure::send`](super::Reconfigure::send). After a timeout the kernel
/// may still change the size, and `lock` is held until it has answered.
pub(crate) fn set_size(
    lock: Box<dyn Send>,
    roots: &Roots,
    index: NbdIndex,
    backend: &BackendId,
    bytes: u64,
    deadline: Deadline,
) -> Result<()> {
    let message = Message {
        command: abi::CMD_RECONFIGURE,
        attributes: vec![
            Attribute::Index(index.get()),
            Attribute::Size(bytes),
            backend_attribute(backend),
        ],
    };
    let attempt = RefusedCommand {
        index: Some(index),
        backend: Some(backend.clone()),
        size: Some(bytes),
        ..RefusedCommand::default()
    };
    let stage = Stage::Reconfigure;
    crash_point!(NbdToReconfigure);
    exchange(&message, lock, &attempt, stage, roots, deadline)?;
    crash_point!(NbdReconfigured);
    Ok(())
}
