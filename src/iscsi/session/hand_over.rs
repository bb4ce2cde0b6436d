//! Makes a session of the kernel from a login.

use std::os::fd::AsFd as _;
use std::time::Duration;

use super::incomplete::destroy_and_wait;
use super::kept;
use super::settings::{NewSessionSettings, RECOVERY, Settings};
use super::{IscsiSession, KernelSession, SessionName, SessionOptions};
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::iscsi::login::Connection;
use crate::iscsi::tunables::Tunable;
use crate::kernel::iscsi_netlink::{Control, CreateLock};
use crate::kernel::{Roots, worker};

/// How long to wait until a failed session is gone: longer than the kernel takes to remove
/// it.
const DESTROY_LIMIT: Duration = Duration::from_secs(10);

/// Hands a connection that has logged in as `name` to the kernel, with all that was
/// negotiated, and reads back that the session is logged in. It scans nothing, so it brings
/// no device.
///
/// One process at a time on the whole machine does this: see
/// [`lock_creation`](super::lock_creation). A process that is killed meanwhile leaves a
/// session. [`destroy_incomplete`](super::destroy_incomplete) ends it, or, once it has its
/// names, [`log_out`](super::log_out).
///
/// Minimum kernel: 5.10 with the module `iscsi_tcp`. It needs root in the initial network
/// namespace. A failure in the middle is undone as soon as the kernel returns, also after a
/// timeout. Only a session that the kernel starts at the very moment of the deadline stays,
/// as a session of ours.
///
/// # Errors
/// `InvalidInput` for a recovery timeout that is no whole number of seconds, and for settings
/// that contradict each other; `NotSupported` without the module; `NotPermitted`; `NotReady`
/// if the target closed the connection meanwhile; `InUse`, naming the process, if another
/// process of lunbd had the right to make sessions for half of the time; `TimedOut` at stage
/// `session`.
pub fn hand_over(
    roots: &Roots,
    name: &SessionName,
    connection: Connection,
    options: &SessionOptions,
    deadline: Deadline,
) -> Result<KernelSession> {
    options.require_valid()?;
    let new_session = NewSessionSettings {
        recovery: options.recovery_timeout.unwrap_or(RECOVERY),
        tunables: &options.tunables,
    };
    let settings = Settings::of(name, &connection, Some(&new_session));
    let host_params = kept::host_params(&options.local);
    let most = |tunable| u16::try_from(options.tunables.value(tunable)).unwrap_or(u16::MAX);
    let (commands, depth) = (most(Tunable::CommandsMax), most(Tunable::QueueDepth));
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
            // Held until the session is started, or gone again. The wait ends at half of the
            // time, so that the caller still gets its error.
            let lock = CreateLock::wait(&roots, deadline.half())?;
            let cmd_sn = connection.session.cmd_sn;
            let (id, host) = control.create_session(&lock, cmd_sn, commands, depth)?;
            let session = IscsiSession::new(&roots, id);
            let started = host_params
                .iter()
                .try_for_each(|(param, value)| control.set_of_host(host, *param, value))
                .and_then(|()| {
                    start_session(&mut control, &session, &connection, &settings, deadline)
                });
            match started {
                Ok(()) => Ok(KernelSession { id, host }),
                Err(error) => {
                    let limit = Deadline::after(DESTROY_LIMIT);
                    if let Err(left) = destroy_and_wait(&mut control, &session, limit) {
                        tracing::warn!(%id, error = %left, "cannot end a failed session");
                    }
                    Err(error)
                }
            }
        },
    )
}

fn start_session(
    control: &mut Control,
    session: &IscsiSession,
    connection: &Connection,
    settings: &Settings,
    deadline: Deadline,
) -> Result<()> {
    let id = session.id();
    control.create_connection(id)?;
    control.bind(id, connection.stream.as_fd())?;
    settings.set(control, id)?;
    control.start(id)?;
    let state = session.state()?;
    if state.as_deref() != Some(IscsiSession::LOGGED_IN) {
        let state = state.as_deref().unwrap_or("gone");
        let message = format!("session {id} was started and is {state}");
        return Err(Error::new(ErrorKind::NotReady, message));
    }
    if deadline.has_passed() {
        // The caller has gone, so no process would know of the session.
        let what = format!("session {id} to be started");
        return Err(Error::timed_out(Stage::Session, deadline, &what));
    }
    Ok(())
}
