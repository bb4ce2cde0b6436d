//! Lookups of files that may be on a file server. A lookup that the server does not answer
//! is given up.

use std::io;
use std::time::Duration;

use super::given_up::GivenUp;
use super::worker;
use crate::deadline::Deadline;
use crate::error::Stage;
use crate::id::DevNo;

/// How long one lookup may take. A local file system answers at once.
const LOOKUP_LIMIT: Duration = Duration::from_secs(2);

/// One lookup takes at most this fraction of its caller's remaining time, so that several
/// lookups that hang leave most of it.
const PART: u32 = 8;

/// The result of a lookup: a block device's number; `None` if it is something else.
type Found = io::Result<Option<DevNo>>;

static GIVEN_UP: GivenUp<Found> = GivenUp::new();

/// The deadline for one lookup that may ask a file server.
pub(crate) fn lookup_deadline(deadline: Deadline) -> Deadline {
    deadline.at_most(LOOKUP_LIMIT.min(deadline.remaining() / PART))
}

/// Runs `call`, which looks up the object called `name`, and returns its result by
/// `deadline`. The kernel may hold the thread even after the process is killed, so `call`
/// must open what it uses itself.
///
/// # Errors
/// Those of `call`; `TimedOut` if this lookup, or an earlier one of the same object, has
/// not returned in time.
pub(crate) fn lookup(
    name: String,
    deadline: Deadline,
    call: impl FnOnce() -> Found + Send + 'static,
) -> Found {
    if GIVEN_UP.has(&name) {
        return Err(io::ErrorKind::TimedOut.into());
    }
    let pending = worker::start_with_own_fd_table(Stage::Claim, move || Ok(call()))
        .map_err(io::Error::other)?;
    match GIVEN_UP.wait(name, pending, deadline) {
        Some(found) => found.map_err(io::Error::other)?,
        None => Err(io::ErrorKind::TimedOut.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const SDA: DevNo = DevNo { major: 8, minor: 0 };

    #[test]
    fn a_look_that_hangs_is_given_up_and_not_begun_again_until_it_has_returned() {
        let name = || "loop7 of this test".to_owned();
        let (release, hang) = mpsc::channel::<()>();
        let short = Deadline::after(Duration::from_millis(80));
        let hanging = lookup(name(), short, move || {
            let _released = hang.recv();
            Ok(None)
        });
        assert_eq!(hanging.unwrap_err().kind(), io::ErrorKind::TimedOut);
        let long = Deadline::after(Duration::from_secs(600));
        let (begun, seen) = mpsc::channel();
        let again = lookup(name(), long, move || {
            let _listens = begun.send(());
            Ok(Some(SDA))
        });
        assert_eq!(again.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert!(seen.recv().is_err(), "it was begun");
        // A lookup of another object is not held up.
        let other = || lookup("loop8 of this test".to_owned(), long, || Ok(Some(SDA)));
        assert_eq!(other().unwrap(), Some(SDA));
        drop(release);
        while lookup(name(), long, || Ok(Some(SDA))).is_err() {
            std::thread::yield_now();
        }
    }
}
