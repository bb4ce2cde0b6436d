//! From a login to a session of the kernel's.

use std::os::fd::AsFd as _;
use std::thread;
use std::time::Duration;

use super::super::login::Connection;
use super::settings::{RECOVERY, Settings};
use super::{KernelSession, SessionName, SessionOptions, StandingSession};
use crate::deadline::{Backoff, Deadline};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::device_dir::DeviceDir;
use crate::kernel::iscsi_netlink::{Control, Stop};
use crate::kernel::{Roots, worker};

/// Hands a connection that has logged in as `name` to the kernel, with all that
/// was negotiated, and reads back that the session stands. Nothing is scanned: no
/// device comes by this alone.
///
/// Minimum kernel: 5.10 with the module `iscsi_tcp`; needs root in the initial
/// network namespace. A failure in the middle is undone, also after a timeout, as
/// soon as the kernel lets go; only what the kernel finishes at the very moment of
/// the deadline stands then, as a session of ours.
///
/// # Errors
/// `NotSupported` without the module; `NotPermitted`; `NotReady` where the target
/// closed the connection meanwhile; `TimedOut` at stage `session`.
pub fn hand_over(
    roots: &Roots,
    name: &SessionName,
    connection: Connection,
    options: &SessionOptions,
    deadline: Deadline,
) -> Result<KernelSession> {
    let recovery = options.recovery_timeout.unwrap_or(RECOVERY);
    let settings = Settings::of(name, &connection, Some(recovery));
    let (roots, what) = (
        roots.clone(),
        format!("the kernel to take the session {name}"),
    );
    worker::run(
        Stage::Session,
        &what,
        deadline,
        || "not returned".to_owned(),
        move || {
            let mut control = Control::open(&roots)?;
            let (id, host) = control.create_session(connection.session.cmd_sn, deadline)?;
            let standing = StandingSession::new(&roots, id);
            match begin(&mut control, &standing, &connection, &settings, deadline) {
                Ok(()) => Ok(KernelSession { id, host }),
                Err(error) => {
                    undo(&mut control, &standing);
                    Err(error)
                }
            }
        },
    )
}

fn begin(
    control: &mut Control,
    standing: &StandingSession,
    connection: &Connection,
    settings: &Settings,
    deadline: Deadline,
) -> Result<()> {
    let id = standing.id();
    control.create_connection(id)?;
    control.bind(id, connection.stream.as_fd())?;
    settings.set(control, id)?;
    control.start(id)?;
    let state = standing.state()?;
    if state.as_deref() != Some(StandingSession::LOGGED_IN) {
        let state = state.as_deref().unwrap_or("gone");
        let message = format!("session {id} was started and is {state}");
        return Err(Error::new(ErrorKind::NotReady, message));
    }
    if deadline.has_passed() {
        // The caller has gone: nobody would know of it.
        let what = format!("session {id} to be started");
        return Err(Error::timed_out(Stage::Session, deadline.elapsed(), &what));
    }
    Ok(())
}

/// Takes away what there is of a session that has no devices, and waits until it is
/// gone with its host, which the kernel does by itself after its answer
/// (`ISCSI_UEVENT_DESTROY_SESSION_ASYNC`). **Blocks.**
fn undo(control: &mut Control, standing: &StandingSession) {
    /// Longer than the kernel takes, and not for ever.
    const PATIENCE: Duration = Duration::from_secs(10);
    let id = standing.id();
    let path = standing.host_dir().ok().flatten();
    let host = path.as_deref().map(DeviceDir::open).transpose();
    let host = host.ok().flatten().flatten();
    // A connection that was never bound is not stopped.
    let stopped = control.stop(id, Stop::Terminate);
    let connection = control.destroy_connection(id);
    if let Err(error) = control.destroy_session(id) {
        tracing::warn!(%id, %error, ?stopped, ?connection, "a session that failed is left");
        return;
    }
    let host_is_there = || {
        let read = host.as_ref().map(|host| host.text("uevent"));
        matches!(read, Some(Ok(Some(_))))
    };
    let patience = Deadline::after(PATIENCE);
    let mut pauses = Backoff::new(Duration::from_millis(1), Duration::from_millis(100));
    while (standing.is_there() || host_is_there()) && !patience.has_passed() {
        thread::park_timeout(pauses.pause());
    }
}
