//! What a resize requires of the server and of the connections of an NBD device, and the errors
//! where it is refused.

#[cfg(feature = "journal")]
use std::error::Error as StdError;

use crate::deadline::Deadline;
use crate::engine::nbd::outcome::HealOutcome;
use crate::engine::resize::request::ResizeRequest;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::NbdIndex;
use crate::nbd::{Connection, Difference};

/// The cause of the error of an interrupted resize that has left the device with a size that it
/// serves to the end.
#[derive(Debug, thiserror::Error)]
#[error("the device serves the size that it has")]
pub(super) struct ServesItsSize(#[source] pub(super) Option<Error>);

/// Whether the error of an interrupted resize says that the device serves the size that it has.
#[cfg(feature = "journal")]
pub(in crate::engine) fn serves_its_size(error: &Error) -> bool {
    StdError::source(error).is_some_and(<dyn StdError>::is::<ServesItsSize>)
}

/// # Errors
/// `NotReady` if the server does not have the size that the request expects yet.
pub(super) fn require_min_size(size: u64, request: &ResizeRequest) -> Result<()> {
    let Some(least) = request.at_least.filter(|&least| size < least) else {
        return Ok(());
    };
    let message = format!("its server reports {size} bytes, expected at least {least}");
    Err(Error::new(ErrorKind::NotReady, message).at(Stage::Handshake))
}

/// The error where a read proves the new size of only one of several connections.
pub(super) fn cannot_replace_several(index: NbdIndex) -> Error {
    let message = format!(
        "nbd{index} has several connections that this process cannot replace, and a read checks \
         the size of only one of them: resize it in the process that attached it, with a \
         dead-connection timeout above zero, or detach it and attach it again"
    );
    Error::new(ErrorKind::NotReady, message).at(Stage::Probe)
}

/// The error where old connections keep the old size: a server may fix it when the
/// connection is made, as nbdkit does, and no process can end another's connections.
pub(super) fn only_new_connections_have_size(index: NbdIndex, before: u64) -> Error {
    let message = format!(
        "the server of nbd{index} serves the new size only on new connections, and this process \
         cannot replace all connections of the device: resize it in the process that attached \
         it, or restart the server, heal the device and resize again; it has {before} bytes"
    );
    Error::new(ErrorKind::NotReady, message).at(Stage::Probe)
}

/// # Errors
/// `NotReady` where the server does not serve the last block of the size that it reports.
pub(super) fn require_served_last_block(
    index: NbdIndex,
    server: &Connection,
    deadline: Deadline,
) -> Result<()> {
    let Err(error) = server.last_block(deadline)? else {
        return Ok(());
    };
    let message = format!(
        "the server of nbd{index} says {} bytes and answers a read of the last block on a new \
         connection with error {error}",
        server.export.size
    );
    Err(Error::new(ErrorKind::NotReady, message).at(Stage::Identify))
}

pub(super) fn require_renewed(outcome: HealOutcome) -> Result<()> {
    match outcome {
        HealOutcome::Failed(error) => Err(error),
        outcome if outcome.serves() => Ok(()),
        outcome => {
            let message = format!(
                "its connections were ended so that new ones serve the new size, and could not \
                 be replaced: {outcome}; heal it"
            );
            Err(Error::new(ErrorKind::NotReady, message).at(Stage::Reconfigure))
        }
    }
}

/// # Errors
/// `IdentityMismatch` where the export is smaller than the device, or differs in a way
/// that the kernel cannot take over.
pub(super) fn size_on_server(
    index: NbdIndex,
    shown: u64,
    differences: &[Difference],
) -> Result<u64> {
    let mut size = shown;
    for difference in differences {
        let message = match difference {
            Difference::Grown { to, .. } => {
                size = *to;
                continue;
            }
            Difference::Shrunk { from, to } => format!(
                "its server reports {to} bytes and nbd{index} has {from}: lunbd never shrinks \
                 an NBD device"
            ),
            other if other.prevents_reattach() => {
                format!("the server of nbd{index} has another export now: {other}")
            }
            _ => continue,
        };
        return Err(Error::new(ErrorKind::IdentityMismatch, message).at(Stage::Handshake));
    }
    Ok(size)
}
