//! REPORT TARGET PORT GROUPS (SPC-5, 6.35): the ALUA access states.

use std::time::Duration;

use super::{LONGEST, Opened, command, page};
use crate::error::{Error, ErrorKind, Result};

const MAINTENANCE_IN: u8 = 0xa3;
/// REPORT TARGET PORT GROUPS is a service action.
const REPORT_TARGET_PORT_GROUPS: u8 = 0x0a;
const HEADER: usize = 4;

/// A group of target ports that share one access state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PortGroup {
    pub(crate) number: u16,
    /// The asymmetric access state, four bits.
    pub(crate) state: u8,
    /// The relative identifiers of the group's ports.
    pub(crate) ports: Vec<u16>,
}

/// The target port groups of the unit; `None` if the device does not know the command.
/// **Blocks** for up to `timeout` per try and the kernel's error recovery: call it on
/// a worker.
///
/// # Errors
/// `Io` if the command failed or the answer is malformed; `NotReady` if the path to the
/// device is down.
pub(crate) fn report_port_groups(
    device: Opened<'_>,
    timeout: Duration,
) -> Result<Option<Vec<PortGroup>>> {
    let mut memory = page()?;
    let mut cdb = [0; 12];
    (cdb[0], cdb[1]) = (MAINTENANCE_IN, REPORT_TARGET_PORT_GROUPS);
    let [high, low] = LONGEST.to_be_bytes();
    // The length is big-endian in bytes 6 to 9.
    (cdb[8], cdb[9]) = (high, low);
    let name = "REPORT TARGET PORT GROUPS";
    let Some(answer) = command(device, name, &cdb, &mut memory, timeout)? else {
        return Ok(None);
    };
    let groups = port_groups(answer).ok_or_else(|| {
        let message = format!("the device's answer to {name} is malformed");
        Error::new(ErrorKind::Io, message)
    })?;
    Ok(Some(groups))
}

/// The groups that are complete in the answer; `None` if it is shorter than its header.
pub(super) fn port_groups(answer: &[u8]) -> Option<Vec<PortGroup>> {
    let (length, rest) = answer.split_first_chunk::<HEADER>()?;
    let length = usize::try_from(u32::from_be_bytes(*length)).unwrap_or(usize::MAX);
    let mut rest = rest.get(..length).unwrap_or(rest);
    let mut groups = Vec::new();
    while let [state, _, high, low, _, _, _, count, after @ ..] = rest {
        let Some((ports, next)) = after.split_at_checked(usize::from(*count) * 4) else {
            break;
        };
        let ports = ports.chunks_exact(4);
        groups.push(PortGroup {
            number: u16::from_be_bytes([*high, *low]),
            state: state & 0x0f,
            ports: ports
                .map(|port| u16::from_be_bytes([port[2], port[3]]))
                .collect(),
        });
        rest = next;
    }
    Some(groups)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_has_its_state_its_number_and_its_ports() {
        let first = [0x80, 0x0f, 0, 1, 0, 2, 0, 2, 0, 0, 0, 7, 0, 0, 1, 0];
        let second = [0x02, 0x0f, 1, 2, 0, 2, 0, 0];
        let answer = [&[0, 0, 0, 24][..], &first, &second, &[0xff; 8]].concat();
        let group = |number, state, ports: &[u16]| PortGroup {
            number,
            state,
            ports: ports.to_vec(),
        };
        let groups = [group(1, 0, &[7, 256]), group(258, 2, &[])];
        assert_eq!(port_groups(&answer).unwrap(), groups);
        // A group that is cut off is passed over.
        assert_eq!(port_groups(&answer[..27]).unwrap(), groups[..1]);
        assert_eq!(port_groups(&[0; 3]), None);
    }
}
