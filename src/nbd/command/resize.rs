//! Telling the kernel the size of a connected device.

use lunbd_sys::nbd as abi;

use super::{backend_attribute, exchange};
use crate::crash::point;
use crate::deadline::Deadline;
use crate::error::{Result, Stage};
use crate::id::{BackendId, NbdIndex};
use crate::kernel::Roots;
use crate::nbd::message::{Attribute, Message};
use crate::nbd::refusal::RefusedCommand;

/// Gives a connected device of this backend id another size in bytes, and nothing else
/// (`NBD_CMD_RECONFIGURE` with a size, Linux 5.4). Its connections and timeouts stay.
///
/// Have the device answer a read first. Newer kernels (6.12) hold its I/O while they
/// change the size, and wait inside this command, under the lock of all generic netlink,
/// for what is in flight: a server that dies in that moment can be replaced only when
/// those requests have failed.
///
/// # Errors
/// As of [`Reconfigure::send`](super::Reconfigure::send). After a timeout the kernel may
/// still change the size.
pub(crate) fn set_size(
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
    point!(NbdToReconfigure);
    exchange(&message, Vec::new(), &attempt, stage, roots, deadline)?;
    point!(NbdReconfigured);
    Ok(())
}
