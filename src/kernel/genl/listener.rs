//! Listens to a family's multicast group on one private thread.
//!
//! The crate genetlink resolves the names and reads the socket. Its runtime
//! lives and ends on that thread, and no caller's context ever sees it.

use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::task::Poll;
use std::time::Duration;

use futures_util::Stream;
use genetlink::message::RawGenlMessage;
use genetlink::{GenetlinkError, new_connection};
use netlink_packet_core::{NetlinkMessage, NetlinkPayload, NlasIterator, parse_string};
use netlink_packet_generic::GenlFamily;
use netlink_packet_generic::constants::{CTRL_ATTR_FAMILY_NAME, CTRL_CMD_NEWFAMILY, GENL_ID_CTRL};
use netlink_sys::{AsyncSocket, Socket, SocketAddr};
use nix::errno::Errno;
use nix::sys::socket::{setsockopt, sockopt};
use tokio::sync::oneshot;

use super::Payload;
use crate::deadline::{Backoff, Deadline};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::threads;

/// What a [`Listener`] delivers.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Notification {
    /// A message of the family.
    Message(Payload),
    /// Messages may be lost: the buffer was full, the socket was replaced, or
    /// the family's module was loaded.
    Missed,
}

/// Listens until it is dropped. If the family's module is loaded later, or
/// loaded anew, the listener joins it then.
#[derive(Debug)]
pub(crate) struct Listener {
    _stop: oneshot::Sender<()>,
}

impl Listener {
    /// Starts the thread, and returns when it listens.
    ///
    /// # Errors
    /// `Io` if a socket, a runtime or the thread cannot be created; `TimedOut`
    /// if another process's hanging command blocks the resolution of names.
    pub(crate) fn start<F: GenlFamily + Send>(
        group: &'static str,
        deadline: Deadline,
        deliver: impl FnMut(Notification) + Send + 'static,
    ) -> Result<Self> {
        let (stop, stopped) = oneshot::channel();
        let (ready, listening) = mpsc::sync_channel(1);
        let family = F::family_name();
        let run = move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_io()
                .enable_time()
                .build();
            match runtime {
                Ok(runtime) => {
                    runtime.block_on(listen::<F>(group, deliver, ready, stopped));
                    // A resolution that hangs must not hold this thread.
                    runtime.shutdown_background();
                }
                Err(error) => {
                    let _ = ready.send(Err(failed(&error)));
                }
            }
        };
        threads::start("lunbd-genl", run)?;
        match listening.recv_timeout(deadline.remaining()) {
            Ok(result) => result.map(|()| Self { _stop: stop }),
            Err(RecvTimeoutError::Timeout) => {
                let what = format!("the kernel to resolve {family} and {group}");
                Err(Error::timed_out(Stage::Resolve, deadline, &what))
            }
            Err(RecvTimeoutError::Disconnected) => {
                Err(Error::new(ErrorKind::Io, "the netlink thread died"))
            }
        }
    }
}

/// Opens one socket after another: it replaces a socket that breaks.
async fn listen<F: GenlFamily>(
    group: &'static str,
    mut deliver: impl FnMut(Notification),
    ready: mpsc::SyncSender<Result<()>>,
    mut stopped: oneshot::Receiver<()>,
) {
    let mut ready = Some(ready);
    let mut backoff = Backoff::new(Duration::from_millis(1), Duration::from_secs(1));
    loop {
        let ended = listen_on_one_socket::<F>(group, &mut deliver, &mut ready, &mut stopped).await;
        match (ended, ready.take()) {
            (Ok(()), _) => return,
            (Err(error), Some(ready)) => {
                let _ = ready.send(Err(error));
                return;
            }
            (Err(error), None) => tracing::warn!(%error, "the netlink listener starts again"),
        }
        let again = tokio::time::timeout(backoff.pause(), &mut stopped).await;
        if again.is_ok() {
            return;
        }
    }
}

enum Next {
    Stop,
    Closed,
    Message(NetlinkMessage<RawGenlMessage>, SocketAddr),
}

/// Listens on one socket until it is told to stop.
async fn listen_on_one_socket<F: GenlFamily>(
    group: &'static str,
    deliver: &mut impl FnMut(Notification),
    ready: &mut Option<mpsc::SyncSender<Result<()>>>,
    stopped: &mut oneshot::Receiver<()>,
) -> Result<()> {
    // Keep the handle: the connection ends without it.
    let (mut connection, _handle, messages) = new_connection().map_err(|error| failed(&error))?;
    prepare(connection.socket_mut().socket_mut())?;
    let mut family = join::<F>(connection.socket_mut().socket_ref(), group).await?;
    match ready.take() {
        Some(ready) => drop(ready.send(Ok(()))),
        // Messages between two sockets are lost.
        None => deliver(Notification::Missed),
    }
    let mut messages = pin!(messages);
    loop {
        match next(&mut connection, messages.as_mut(), stopped).await {
            Next::Stop => return Ok(()),
            Next::Closed => return Err(Error::new(ErrorKind::Io, "the netlink socket broke")),
            Next::Message(_, sender) if sender.port_number() != 0 => {
                tracing::debug!(%sender, "a netlink message from an unknown sender");
            }
            Next::Message(message, _) => match message.payload {
                NetlinkPayload::Overrun(_) => deliver(Notification::Missed),
                NetlinkPayload::InnerMessage(message) if Some(message.family_id) == family => {
                    deliver(Notification::Message(Payload {
                        command: message.header.cmd,
                        version: message.header.version,
                        attributes: message.payload,
                    }));
                }
                NetlinkPayload::InnerMessage(message) if announces::<F>(&message) => {
                    family = join::<F>(connection.socket_mut().socket_ref(), group).await?;
                    deliver(Notification::Missed);
                }
                _ => {}
            },
        }
    }
}

/// Reads the socket until there is a message, or until the listening ends.
async fn next(
    connection: &mut (impl Future + Unpin),
    mut messages: Pin<&mut impl Stream<Item = (NetlinkMessage<RawGenlMessage>, SocketAddr)>>,
    stopped: &mut oneshot::Receiver<()>,
) -> Next {
    poll_fn(|context| {
        if Pin::new(&mut *stopped).poll(context).is_ready() {
            return Poll::Ready(Next::Stop);
        }
        // Poll once before reading the socket, so that messages do not pile
        // up, and once after it, because nothing else wakes this task for
        // what was read.
        for read in [false, true] {
            if read && Pin::new(&mut *connection).poll(context).is_ready() {
                return Poll::Ready(Next::Closed);
            }
            match messages.as_mut().poll_next(context) {
                Poll::Ready(Some((message, sender))) => {
                    return Poll::Ready(Next::Message(message, sender));
                }
                Poll::Ready(None) => return Poll::Ready(Next::Closed),
                Poll::Pending => {}
            }
        }
        Poll::Pending
    })
    .await
}

/// Binds a socket, enlarges its buffer, and joins the group in which the controller announces
/// families. It joins before the family is resolved, so that a family loaded meanwhile is
/// either resolved or announced.
fn prepare(socket: &mut Socket) -> Result<()> {
    /// The default holds some hundred messages.
    const RECEIVE_BUFFER: usize = 1 << 20;
    // A socket without a number of its own gets no multicasts: the kernel takes
    // it for the sender (`net/netlink/af_netlink.c`, `do_one_broadcast`).
    socket.bind_auto().map_err(|error| failed(&error))?;
    setsockopt(socket, sockopt::RcvBufForce, &RECEIVE_BUFFER)
        .or_else(|_| setsockopt(socket, sockopt::RcvBuf, &RECEIVE_BUFFER))
        .map_err(|errno| failed(&errno.into()))?;
    socket
        .add_membership(GENL_ID_CTRL.into())
        .map_err(|error| failed(&error))
}

/// Joins the group and returns the family's number; `None` if there is no such
/// family.
async fn join<F: GenlFamily>(socket: &Socket, group: &str) -> Result<Option<u16>> {
    let (connection, handle, _messages) = new_connection().map_err(|error| failed(&error))?;
    let reading = tokio::spawn(connection);
    let family = handle.resolve_family::<F>().await;
    reading.abort();
    let family = match family {
        Ok(family) => family,
        Err(GenetlinkError::NetlinkError(error)) if is_missing(&error) => return Ok(None),
        Err(error) => {
            let message = format!("cannot resolve {}", F::family_name());
            return Err(Error::new(ErrorKind::Io, message).caused_by(error));
        }
    };
    let number = family.multicast_groups.get(group).ok_or_else(|| {
        let message = format!("the family {} has no group {group}", family.name);
        Error::new(ErrorKind::NotSupported, message)
    })?;
    socket
        .add_membership(*number)
        .map_err(|error| failed(&error))?;
    Ok(Some(family.id))
}

fn is_missing(error: &io::Error) -> bool {
    error.raw_os_error().map(Errno::from_raw) == Some(Errno::ENOENT)
}

/// Whether the controller announces that the family now exists.
fn announces<F: GenlFamily>(message: &RawGenlMessage) -> bool {
    message.family_id == GENL_ID_CTRL
        && message.header.cmd == CTRL_CMD_NEWFAMILY
        && NlasIterator::new(&message.payload)
            .map_while(Result::ok)
            .find(|attribute| attribute.kind() == CTRL_ATTR_FAMILY_NAME)
            .and_then(|attribute| parse_string(attribute.value()).ok())
            .is_some_and(|name| name == F::family_name())
}

fn failed(error: &io::Error) -> Error {
    super::connection::failed("cannot listen to generic netlink", error)
}

#[cfg(test)]
mod tests {
    use netlink_packet_generic::constants::CTRL_CMD_NEWMCAST_GRP;

    use super::*;

    struct Absent;

    impl GenlFamily for Absent {
        fn family_name() -> &'static str {
            "lunbd-none"
        }

        fn command(&self) -> u8 {
            0
        }

        fn version(&self) -> u8 {
            0
        }
    }

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(10))
    }

    #[test]
    fn a_family_that_is_not_there_yet_is_waited_for() {
        let (sender, notifications) = mpsc::channel();
        let deliver = move |what| drop(sender.send(what));
        let listener = Listener::start::<Absent>("any", soon(), deliver).unwrap();
        assert!(notifications.try_recv().is_err());
        // The thread drops `deliver` when it ends.
        drop(listener);
        let ended = notifications.recv_timeout(Duration::from_secs(10));
        assert_eq!(ended, Err(RecvTimeoutError::Disconnected));
    }

    #[test]
    fn only_the_familys_own_announcement_counts() {
        let named = |name: &str, command| {
            let payload = crate::kernel::genl::family::get_family(name);
            let header = netlink_packet_generic::GenlHeader {
                cmd: command,
                version: 2,
            };
            RawGenlMessage::new(header, payload.attributes, GENL_ID_CTRL)
        };
        assert!(announces::<Absent>(&named(
            "lunbd-none",
            CTRL_CMD_NEWFAMILY
        )));
        assert!(!announces::<Absent>(&named(
            "lunbd-none",
            CTRL_CMD_NEWMCAST_GRP
        )));
        assert!(!announces::<Absent>(&named(
            "lunbd-nones",
            CTRL_CMD_NEWFAMILY
        )));
    }
}
