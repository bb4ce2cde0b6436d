//! The command that gives a connected device new connections.

use std::os::fd::OwnedFd;

use lunbd_sys::nbd as abi;

use super::{NewTimeouts, backend_attribute, exchange, require_sockets, sockets_attribute};
use crate::crash::crash_point;
use crate::deadline::Deadline;
use crate::error::{Result, Stage};
use crate::id::{BackendId, NbdIndex};
use crate::kernel::Roots;
use crate::nbd::message::{Attribute, ClientFlags, Message};
use crate::nbd::refusal::RefusedCommand;

/// Gives new sockets or settings to a connected device (`NBD_CMD_RECONFIGURE`).
///
/// The kernel takes one socket for each dead connection and **silently drops the
/// others**: its success does not prove that it took a socket. Shut the old
/// connection down first, and prove the new one by traffic. This command does not
/// change the size: the kernel would apply the size first and wait, inside this
/// call, for the I/O that waits for the new socket.
#[derive(Debug)]
pub struct Reconfigure {
    index: NbdIndex,
    sockets: Vec<OwnedFd>,
    timeouts: NewTimeouts,
    client_flags: Option<ClientFlags>,
    backend: Option<BackendId>,
}

impl Reconfigure {
    /// Changes only these timeouts of a device, so far.
    #[must_use]
    pub fn new(index: NbdIndex, timeouts: impl Into<NewTimeouts>) -> Self {
        Self {
            index,
            sockets: Vec::new(),
            timeouts: timeouts.into(),
            client_flags: None,
            backend: None,
        }
    }

    /// New connections in place of dead ones, as in
    /// [`Connect::new`](super::Connect::new).
    #[must_use]
    pub fn sockets(mut self, sockets: Vec<OwnedFd>) -> Self {
        self.sockets = sockets;
        self
    }

    /// All that the kernel does when the device is disconnected or closed. A flag
    /// that is left out is cleared.
    #[must_use]
    pub fn client_flags(mut self, flags: ClientFlags) -> Self {
        self.client_flags = Some(flags);
        self
    }

    /// The device's own id. For a device with an id the kernel refuses another id
    /// or none. For a device without an id it ignores this.
    #[must_use]
    pub fn backend(mut self, id: BackendId) -> Self {
        self.backend = Some(id);
        self
    }

    /// The message to send.
    #[must_use]
    pub fn message(&self) -> Message {
        let mut attributes = vec![Attribute::Index(self.index.get())];
        attributes.extend(self.timeouts.attributes());
        attributes.extend(self.client_flags.map(Attribute::ClientFlags));
        attributes.extend(self.backend.as_ref().map(backend_attribute));
        if !self.sockets.is_empty() {
            attributes.push(sockets_attribute(&self.sockets));
        }
        Message {
            command: abi::CMD_RECONFIGURE,
            attributes,
        }
    }

    /// Sends the message. After a timeout the kernel may still take a socket.
    ///
    /// # Errors
    /// `Refused`, `IdentityMismatch` or `NotFound` with a
    /// [`Refusal`](crate::nbd::Refusal) as the cause; `NotSupported`;
    /// `NotPermitted`; `TimedOut` at stage `reconfigure`.
    pub fn send(self, roots: &Roots, deadline: Deadline) -> Result<()> {
        self.send_under(Box::new(()), roots, deadline)
    }

    /// The same. `locks` are held until the kernel has returned.
    pub(crate) fn send_under(
        self,
        locks: Box<dyn Send>,
        roots: &Roots,
        deadline: Deadline,
    ) -> Result<()> {
        if !self.sockets.is_empty() {
            require_sockets(&self.sockets, Stage::Reconfigure)?;
        }
        let attempt = RefusedCommand {
            index: Some(self.index),
            backend: self.backend.clone(),
            sockets: self.sockets.len(),
            ..RefusedCommand::default()
        };
        let message = self.message();
        let stage = Stage::Reconfigure;
        crash_point!(NbdToReconfigure);
        exchange(
            &message,
            Box::new((self.sockets, locks)),
            &attempt,
            stage,
            roots,
            deadline,
        )?;
        crash_point!(NbdReconfigured);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::nbd::command::tests::HEALING;

    #[test]
    fn a_reconfiguration_never_names_a_size() {
        let reconfigure = Reconfigure::new(NbdIndex::new(0).unwrap(), HEALING)
            .client_flags(ClientFlags::DISCONNECT_ON_CLOSE);
        let message = reconfigure.message();
        assert_eq!(message.attributes.len(), 4, "{message:?}");
        let size = |attribute: &Attribute| {
            matches!(attribute, Attribute::Size(_) | Attribute::BlockSize(_))
        };
        assert!(!message.attributes.iter().any(size));
        assert!(
            !message
                .attributes
                .iter()
                .any(|a| matches!(a, Attribute::Sockets(_)))
        );
    }

    #[test]
    fn a_timeout_that_is_not_said_stays_as_the_kernel_has_it() {
        let message = |timeouts: NewTimeouts| {
            let reconfigure = Reconfigure::new(NbdIndex::new(3).unwrap(), timeouts);
            reconfigure.message().attributes
        };
        assert_eq!(message(NewTimeouts::default()), [Attribute::Index(3)]);
        let dead_connection = Some(Duration::from_secs(60));
        let timeouts = NewTimeouts {
            dead_connection,
            ..NewTimeouts::default()
        };
        assert_eq!(
            message(timeouts),
            [Attribute::Index(3), Attribute::DeadConnTimeout(60)]
        );
    }
}
