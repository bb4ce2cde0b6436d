//! The numbers that the kernel assigned to families.

use std::collections::BTreeMap;

use netlink_packet_core::{Emitable, NlasIterator, parse_u16};
use netlink_packet_generic::constants::{CTRL_ATTR_FAMILY_ID, CTRL_CMD_GETFAMILY, GENL_ID_CTRL};
use netlink_packet_generic::ctrl::nlas::GenlCtrlAttrs;
use parking_lot::Mutex;

use super::connection::Connection;
use super::conversation::Payload;
use crate::error::{Error, ErrorKind, Result};

/// A process resolves each family once, because a request waits behind every
/// other command.
static KNOWN: Mutex<BTreeMap<&'static str, u16>> = Mutex::new(BTreeMap::new());

pub(super) fn known(family: &str) -> Option<u16> {
    KNOWN.lock().get(family).copied()
}

pub(super) fn remember(family: &'static str, id: u16) {
    KNOWN.lock().insert(family, id);
}

/// Asks the kernel for the family's number and remembers it.
///
/// # Errors
/// `NotSupported` if this network namespace has no such family.
pub(super) fn resolve(connection: &mut Connection, family: &'static str) -> Result<u16> {
    KNOWN.lock().remove(family);
    let answers = connection.exchange(GENL_ID_CTRL, &get_family(family));
    let answers = answers.map_err(|error| match error.errno() {
        Some(nix::libc::ENOENT) => missing(family).caused_by(error),
        _ => error,
    })?;
    let id = answers.iter().find_map(id_in).ok_or_else(|| {
        let message = format!("the kernel named no number for the family {family}");
        Error::new(ErrorKind::Io, message)
    })?;
    remember(family, id);
    Ok(id)
}

fn missing(family: &str) -> Error {
    let message = format!(
        "the kernel has no generic netlink family {family} here: its module is not loaded, or \
         this is not the network namespace of the machine's first process"
    );
    Error::new(ErrorKind::NotSupported, message)
}

pub(super) fn get_family(name: &str) -> Payload {
    let attribute = GenlCtrlAttrs::FamilyName(name.to_owned());
    let mut attributes = vec![0; attribute.buffer_len()];
    attribute.emit(&mut attributes);
    Payload {
        command: CTRL_CMD_GETFAMILY,
        version: 1,
        attributes,
    }
}

/// Reads only this attribute, so attributes of a later kernel do not matter.
pub(super) fn id_in(answer: &Payload) -> Option<u16> {
    NlasIterator::new(&answer.attributes)
        .map_while(Result::ok)
        .find(|attribute| attribute.kind() == CTRL_ATTR_FAMILY_ID)
        .and_then(|attribute| parse_u16(attribute.value()).ok())
}
