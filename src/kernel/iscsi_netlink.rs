//! The kernel's iSCSI: requests about sessions over `NETLINK_ISCSI`
//! (`drivers/scsi/scsi_transport_iscsi.c`), with the driver `iscsi_tcp`.
//!
//! The kernel does the work inside `sendmsg(2)` and under one mutex for the whole machine
//! (`iscsi_if_rx`, `rx_queue_mutex`): a request that hangs there blocks those of every
//! session. Requests need root in the initial network namespace. Statistics are never
//! requested (`ISCSI_UEVENT_GET_STATS`): if no process listens, the kernel tries to send them
//! for ever, under that mutex (`iscsi_if_get_stats`).

mod create_lock;
mod listener;
mod socket;

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::path::PathBuf;

use lunbd_sys::iscsi::{self, Answer, Request};
pub(crate) use lunbd_sys::iscsi::{HostParam, Param, Stop};
use netlink_sys::Socket;
use nix::errno::Errno;

use self::socket::{failed, open_as};
use super::{Roots, sysfs};
use crate::crash::crash_point;
use crate::error::{Error, ErrorKind, Result};
use crate::id::{HostNo, SessionId};
pub use create_lock::CreateGuard;
pub(crate) use create_lock::{CreateLock, holder_of_port};
pub(crate) use listener::{Listener, Notification};

/// The only connection of a session of ours.
const CID: u32 = 0;

/// Sends requests to the kernel, one after the other. **Every call blocks for as long as the
/// kernel works on it, or on the request of another process**: call it on a worker only.
///
/// The kernel's answers carry no number (`nlmsg_seq` is 0), so the socket must not be used
/// again after a call that failed for another reason than a refusal.
#[derive(Debug)]
pub(crate) struct Control {
    socket: Socket,
    /// The driver's handle, an address in the kernel.
    transport: u64,
}

impl Control {
    /// Opens a socket for requests to `iscsi_tcp`.
    ///
    /// # Errors
    /// `NotSupported` if the module `iscsi_tcp` is not loaded; `NotPermitted` without root.
    pub(crate) fn open(roots: &Roots) -> Result<Self> {
        let transport = sysfs::parse(&handle_in(roots)).map_err(|error| match error.kind() {
            ErrorKind::Vanished => {
                let message = "the kernel has no iSCSI over TCP: load the module iscsi_tcp";
                Error::new(ErrorKind::NotSupported, message).caused_by(error)
            }
            _ => error,
        })?;
        let socket = open_as(0)?;
        Ok(Self { socket, transport })
    }

    /// `ISCSI_UEVENT_CREATE_SESSION`: makes a session without a connection, and its SCSI host.
    /// `cmd_sn` must be the number that its login had, or its commands hang.
    ///
    /// Its `creator` is the port of `lock`: -1 if that was free. An iscsid that starts leaves
    /// such a session alone, and takes over all others. `cmds_max` must be a power of 2.
    pub(crate) fn create_session(
        &mut self,
        lock: &CreateLock,
        cmd_sn: u32,
        cmds_max: u16,
        queue_depth: u16,
    ) -> Result<(SessionId, HostNo)> {
        let create = Request::CreateSession {
            initial_cmdsn: cmd_sn,
            cmds_max,
            queue_depth,
        };
        crash_point!(IscsiToCreateSession);
        let answer = ask(lock.socket(), self.transport, &create, "make a session")?;
        crash_point!(IscsiSessionCreated);
        let [sid, host] = answer.result;
        Ok((SessionId(sid), HostNo(host)))
    }

    /// `ISCSI_UEVENT_CREATE_CONN`: makes the session's connection, without a socket.
    pub(crate) fn create_connection(&mut self, session: SessionId) -> Result<()> {
        let create = Request::CreateConnection {
            sid: session.0,
            cid: CID,
        };
        crash_point!(IscsiToCreateConnection);
        self.ask(&create, "make a connection")?;
        crash_point!(IscsiConnectionCreated);
        Ok(())
    }

    /// `ISCSI_UEVENT_BIND_CONN`: gives the connection its socket, which the kernel keeps. A
    /// lost connection must be stopped first ([`Stop::Recover`]).
    ///
    /// # Errors
    /// `ENOTCONN` on a lost connection that was not stopped; `Refused` for a file that is no
    /// TCP socket.
    pub(crate) fn bind(&mut self, session: SessionId, socket: BorrowedFd<'_>) -> Result<()> {
        let bind = Request::BindConnection {
            sid: session.0,
            cid: CID,
            fd: socket.as_raw_fd(),
        };
        crash_point!(IscsiToBind);
        self.ask(&bind, "take the socket")?;
        crash_point!(IscsiBound);
        Ok(())
    }

    /// `ISCSI_UEVENT_SET_PARAM`: sets a parameter of the session or of its connection. The
    /// connection must be bound, except for the recovery timeout.
    pub(crate) fn set(&mut self, session: SessionId, param: Param, value: &str) -> Result<()> {
        let set = Request::SetParam {
            sid: session.0,
            cid: CID,
            param,
            value,
        };
        crash_point!(IscsiToSet);
        self.ask(&set, &format!("set {param:?} to {value}"))?;
        crash_point!(IscsiSet);
        Ok(())
    }

    /// Returns when the kernel has ended the requests that other processes made before: it works
    /// on one at a time. This request is for no session, so the kernel refuses it.
    pub(crate) fn wait_for_earlier_requests(&mut self) -> Result<()> {
        let nothing = Request::SetParam {
            sid: u32::MAX,
            cid: CID,
            param: Param::RecoveryTimeout,
            value: "0",
        };
        match self.ask(&nothing, "set a parameter of no session") {
            Err(error) if error.errno() == Some(Errno::EINVAL as i32) => Ok(()),
            done => done,
        }
    }

    /// `ISCSI_UEVENT_SET_HOST_PARAM`: sets a parameter of a session's SCSI host.
    pub(crate) fn set_of_host(
        &mut self,
        host: HostNo,
        param: HostParam,
        value: &str,
    ) -> Result<()> {
        let set = Request::SetHostParam {
            host: host.0,
            param,
            value,
        };
        crash_point!(IscsiToSet);
        self.ask(&set, &format!("set {param:?} to {value}"))?;
        crash_point!(IscsiSet);
        Ok(())
    }

    /// `ISCSI_UEVENT_START_CONN`: the session is logged in, and I/O may begin or go on. The
    /// kernel accepts this also for a connection that never had a socket.
    pub(crate) fn start(&mut self, session: SessionId) -> Result<()> {
        let start = Request::StartConnection {
            sid: session.0,
            cid: CID,
        };
        crash_point!(IscsiToStart);
        self.ask(&start, "start the connection")?;
        crash_point!(IscsiStarted);
        Ok(())
    }

    /// `ISCSI_UEVENT_STOP_CONN`: the kernel releases the socket.
    pub(crate) fn stop(&mut self, session: SessionId, stop: Stop) -> Result<()> {
        let stop = Request::StopConnection {
            sid: session.0,
            cid: CID,
            stop,
        };
        crash_point!(IscsiToStop);
        self.ask(&stop, "stop the connection")?;
        crash_point!(IscsiStopped);
        Ok(())
    }

    /// `ISCSI_UEVENT_SEND_PDU`: sends a whole PDU, header, data and padding. The kernel
    /// overwrites its task tag and its `CmdSN`.
    ///
    /// # Errors
    /// `NotPermitted` if the kernel is not done with the PDU before it.
    pub(crate) fn send_pdu(&mut self, session: SessionId, pdu: &[u8]) -> Result<()> {
        let Some((header, data)) = pdu.split_first_chunk() else {
            let message = "a PDU has at least 48 bytes";
            return Err(Error::new(ErrorKind::InvalidInput, message));
        };
        let send = Request::SendPdu {
            sid: session.0,
            cid: CID,
            header,
            data,
        };
        crash_point!(IscsiToSend);
        self.ask(&send, "send a PDU")?;
        crash_point!(IscsiSent);
        Ok(())
    }

    /// `ISCSI_UEVENT_UNBIND_SESSION`: begins to remove the target and its devices.
    /// [`Notification::Unbound`] comes when they are gone, once in a session's life.
    pub(crate) fn unbind(&mut self, session: SessionId) -> Result<()> {
        let unbind = Request::UnbindSession { sid: session.0 };
        crash_point!(IscsiToUnbind);
        self.ask(&unbind, "remove the target")?;
        crash_point!(IscsiUnbound);
        Ok(())
    }

    /// `ISCSI_UEVENT_DESTROY_CONN`: destroys a stopped connection.
    pub(crate) fn destroy_connection(&mut self, session: SessionId) -> Result<()> {
        let destroy = Request::DestroyConnection {
            sid: session.0,
            cid: CID,
        };
        crash_point!(IscsiToDestroyConnection);
        self.ask(&destroy, "destroy the connection")?;
        crash_point!(IscsiConnectionDestroyed);
        Ok(())
    }

    /// `ISCSI_UEVENT_DESTROY_SESSION_ASYNC`: the session is no longer found by its number, and
    /// goes away with its host soon after. The synchronous request holds the machine's mutex
    /// meanwhile.
    ///
    /// # Errors
    /// `InUse` while it has a connection.
    pub(crate) fn destroy_session(&mut self, session: SessionId) -> Result<()> {
        let destroy = Request::DestroySessionAsync { sid: session.0 };
        crash_point!(IscsiToDestroySession);
        self.ask(&destroy, "destroy the session")?;
        crash_point!(IscsiSessionDestroyed);
        Ok(())
    }

    fn ask(&mut self, request: &Request<'_>, what: &str) -> Result<()> {
        let answer = ask(&self.socket, self.transport, request, what)?;
        let has_retcode = matches!(
            request,
            Request::BindConnection { .. }
                | Request::StartConnection { .. }
                | Request::SendPdu { .. }
        );
        if has_retcode && answer.retcode() != 0 {
            return Err(refused(what, answer.retcode().saturating_neg()));
        }
        Ok(())
    }
}

/// Whether the module `iscsi_tcp` is loaded.
pub(crate) fn has_driver(roots: &Roots) -> bool {
    handle_in(roots).exists()
}

fn handle_in(roots: &Roots) -> PathBuf {
    roots.sysfs.join("class/iscsi_transport/tcp/handle")
}

fn ask(socket: &Socket, transport: u64, request: &Request<'_>, what: &str) -> Result<Answer> {
    let message = request.encode(transport);
    match socket.send(&message, 0) {
        Ok(sent) if sent == message.len() => {}
        Ok(_) => return Err(Error::new(ErrorKind::Io, "the request was cut short")),
        Err(error) => return Err(failed("cannot send to the kernel's iSCSI", &error)),
    }
    // The kernel has queued its answer by now.
    let mut buffer = Vec::with_capacity(4096);
    loop {
        buffer.clear();
        match socket.recv_from(&mut buffer, nix::libc::MSG_DONTWAIT) {
            Ok((_, sender)) if sender.port_number() != 0 => {
                tracing::debug!(%sender, "a netlink message from an unknown sender");
                continue;
            }
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(failed("the kernel's iSCSI does not answer", &error)),
        }
        let mut answers = iscsi::messages(&buffer).filter_map(iscsi::answer);
        if let Some(answer) = answers.find(|answer| answer.number == request.number()) {
            tracing::trace!(?request, ?answer, "the kernel's iSCSI");
            return match answer.refused {
                0 => Ok(answer),
                errno => Err(refused(what, errno)),
            };
        }
    }
}

fn refused(what: &str, errno: i32) -> Error {
    let action = format!("the kernel's iSCSI does not {what}");
    Error::of_errno(&action, Errno::from_raw(errno))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_on_a_machine_without_the_driver_names_the_module() {
        let root = tempfile::tempdir().unwrap();
        let error = Control::open(&Roots::below(root.path())).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotSupported);
        assert!(error.to_string().contains("iscsi_tcp"), "{error}");
    }

    #[test]
    fn a_refusal_has_the_kernels_errno_and_names_what_was_asked() {
        let error = refused("take the socket", 107);
        assert_eq!(error.errno(), Some(107));
        assert!(error.to_string().contains("take the socket"), "{error}");
        let elsewhere = io::Error::from_raw_os_error(Errno::ECONNREFUSED as i32);
        let elsewhere = failed("cannot send", &elsewhere);
        assert_eq!(elsewhere.kind(), ErrorKind::NotSupported);
        assert!(elsewhere.to_string().contains("network namespace"));
    }
}
