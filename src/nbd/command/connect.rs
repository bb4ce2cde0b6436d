//! The command that connects a device.

use std::os::fd::OwnedFd;

use lunbd_sys::nbd as abi;

use super::{
    NewTimeouts, Timeouts, backend_attribute, exchange, require_sockets, sockets_attribute,
};
use crate::crash::crash_point;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{BackendId, NbdIndex};
use crate::kernel::Roots;
use crate::nbd::export::ExportFlags;
use crate::nbd::message::{Attribute, ClientFlags, Message};
use crate::nbd::refusal::RefusedCommand;

/// Connects an unconnected device (`NBD_CMD_CONNECT`, Linux 4.12).
#[derive(Debug)]
pub struct Connect {
    sockets: Vec<OwnedFd>,
    size: u64,
    timeouts: Timeouts,
    index: Option<NbdIndex>,
    block_size: Option<u32>,
    server_flags: ExportFlags,
    client_flags: ClientFlags,
    backend: Option<BackendId>,
}

impl Connect {
    /// A device of `size` bytes over `sockets`. These are connected TCP or unix
    /// stream sockets, past the handshake, without timeouts of their own (a
    /// timeout would end an idle connection). The kernel keeps the connections.
    /// The descriptors are closed when the command has returned.
    #[must_use]
    pub fn new(sockets: Vec<OwnedFd>, size: u64, timeouts: Timeouts) -> Self {
        Self {
            sockets,
            size,
            timeouts,
            index: None,
            block_size: None,
            server_flags: ExportFlags::empty(),
            client_flags: ClientFlags::empty(),
            backend: None,
        }
    }

    /// Connects this device instead of the lowest free one. The kernel creates
    /// it if it does not exist.
    #[must_use]
    pub fn index(mut self, index: NbdIndex) -> Self {
        self.index = Some(index);
        self
    }

    /// The logical block size in bytes: a power of two from 512 to the page
    /// size (the newest kernels, seen on 7.2, take more). The default is 1,024.
    #[must_use]
    pub fn block_size(mut self, bytes: u32) -> Self {
        self.block_size = Some(bytes);
        self
    }

    /// The flags that the server announced for the export.
    #[must_use]
    pub fn server_flags(mut self, flags: ExportFlags) -> Self {
        self.server_flags = flags;
        self
    }

    /// What the kernel does when the device is disconnected or closed; nothing
    /// by default.
    #[must_use]
    pub fn client_flags(mut self, flags: ClientFlags) -> Self {
        self.client_flags = flags;
        self
    }

    /// The name that sysfs shows and that a reconfiguration must repeat. A
    /// kernel before 5.14 ignores it, so read it back.
    #[must_use]
    pub fn backend(mut self, id: BackendId) -> Self {
        self.backend = Some(id);
        self
    }

    /// The message to send.
    #[must_use]
    pub fn message(&self) -> Message {
        let mut attributes = Vec::new();
        attributes.extend(self.index.map(|index| Attribute::Index(index.get())));
        attributes.push(Attribute::Size(self.size));
        attributes.extend(
            self.block_size
                .map(|size| Attribute::BlockSize(size.into())),
        );
        attributes.extend(NewTimeouts::from(self.timeouts).attributes());
        attributes.push(Attribute::ServerFlags(self.server_flags.bits().into()));
        attributes.push(Attribute::ClientFlags(self.client_flags));
        attributes.extend(self.backend.as_ref().map(backend_attribute));
        attributes.push(sockets_attribute(&self.sockets));
        Message {
            command: abi::CMD_CONNECT,
            attributes,
        }
    }

    /// Sends the message, and returns the device's index once the kernel has
    /// connected the device. Its `change` event (`add` for a new device) comes
    /// before that.
    ///
    /// After a timeout the device may still be connected: look for its `pid`
    /// and backend id.
    ///
    /// # Errors
    /// `InUse` if the device is connected or open, `Refused` and
    /// `InvalidInput`, each with a [`Refusal`](crate::nbd::Refusal) as the
    /// cause; `NotSupported` without the `nbd` module; `NotPermitted`;
    /// `TimedOut` at stage `connect`.
    pub fn send(self, roots: &Roots, deadline: Deadline) -> Result<NbdIndex> {
        self.send_under(Box::new(()), roots, deadline)
    }

    /// The same. `locks` are held until the kernel has returned, so that no other process
    /// connects the same index or backend id before a command that comes after its timeout.
    pub(crate) fn send_under(
        self,
        locks: Box<dyn Send>,
        roots: &Roots,
        deadline: Deadline,
    ) -> Result<NbdIndex> {
        require_sockets(&self.sockets, Stage::Connect)?;
        let attempt = RefusedCommand {
            index: self.index,
            backend: self.backend.clone(),
            block_size: self.block_size,
            size: Some(self.size),
            sockets: self.sockets.len(),
            multi_conn: self.server_flags.contains(ExportFlags::CAN_MULTI_CONN),
        };
        let message = self.message();
        let stage = Stage::Connect;
        crash_point!(NbdToConnect);
        let held = Box::new((self.sockets, locks));
        let answers = exchange(&message, held, &attempt, stage, roots, deadline)?;
        crash_point!(NbdConnected);
        let mut attributes = answers.iter().flat_map(|answer| &answer.attributes);
        attributes
            .find_map(|attribute| match attribute {
                Attribute::Index(index) => NbdIndex::new(*index),
                _ => None,
            })
            .ok_or_else(|| {
                let message = "the kernel connected a device and did not say which";
                Error::new(ErrorKind::Io, message).at(stage)
            })
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use super::*;
    use crate::nbd::command::tests::HEALING;

    #[test]
    fn a_connect_message_has_the_given_attributes_and_always_both_timeouts() {
        let (socket, _peer) = UnixStream::pair().unwrap();
        let socket = OwnedFd::from(socket);
        let number = u32::try_from(socket.as_raw_fd()).unwrap();
        let flags = ExportFlags::HAS_FLAGS | ExportFlags::SEND_FLUSH;
        let id: BackendId = "vol-1".parse().unwrap();
        let connect = Connect::new(vec![socket], 1 << 30, HEALING)
            .index(NbdIndex::new(7).unwrap())
            .block_size(4096)
            .server_flags(flags)
            .backend(id);
        let mut expected = vec![
            Attribute::Index(7),
            Attribute::Size(1 << 30),
            Attribute::BlockSize(4096),
        ];
        expected.extend(NewTimeouts::from(HEALING).attributes());
        expected.extend([
            Attribute::ServerFlags(5),
            Attribute::ClientFlags(ClientFlags::empty()),
            Attribute::BackendId("vol-1".to_owned()),
            Attribute::Sockets(vec![number]),
        ]);
        assert_eq!(connect.message().attributes, expected);
    }

    #[test]
    fn a_connect_without_a_socket_reaches_no_kernel() {
        let connect = Connect::new(Vec::new(), 512, HEALING);
        let deadline = Deadline::after(Duration::ZERO);
        let error = connect.send(&Roots::default(), deadline).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
    }
}
