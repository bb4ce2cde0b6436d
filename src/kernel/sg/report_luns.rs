//! REPORT LUNS (SPC-5, 6.33).

use std::time::Duration;

use memmap2::MmapMut;

use super::{Opened, command};
use crate::error::{Error, ErrorKind, Result};
use crate::id::Lun;

const REPORT_LUNS: u8 = 0xa0;
/// The header: the length of the list, and four reserved bytes.
const HEADER: usize = 8;
/// The allocation length of the first try, and that of the second, which has
/// room for 16,384 units. Flat addresses can name no more.
const LENGTHS: [u32; 2] = [4096, 16_384 * 8 + 8];

/// All LUNs that the device's target has for this initiator port. **Blocks** for
/// up to `timeout` per try and the kernel's error recovery: call it on a
/// worker.
///
/// # Errors
/// `Io` if the command failed, or if the list is malformed or too long;
/// `NotReady` if the path to the device is down; `NotSupported` if the device
/// refuses the command.
pub(crate) fn report_luns(device: Opened<'_>, timeout: Duration) -> Result<Vec<Lun>> {
    const NAME: &str = "REPORT LUNS";
    for length in LENGTHS {
        let bytes = usize::try_from(length).unwrap_or(usize::MAX);
        let mut memory = MmapMut::map_anon(bytes)
            .map_err(|error| Error::new(ErrorKind::Io, format!("no memory: {error}")))?;
        let [a, b, c, d] = length.to_be_bytes();
        let cdb = [REPORT_LUNS, 0, 0, 0, 0, 0, a, b, c, d, 0, 0];
        let Some(answer) = command(device, NAME, &cdb, &mut memory, timeout)? else {
            let message = "the device refuses REPORT LUNS";
            return Err(Error::new(ErrorKind::NotSupported, message));
        };
        if let Some(luns) = whole_list(answer) {
            return Ok(luns);
        }
    }
    let message = "the device's answer to REPORT LUNS is malformed or cut short";
    Err(Error::new(ErrorKind::Io, message))
}

/// `None` if the answer does not hold the whole list.
pub(super) fn whole_list(answer: &[u8]) -> Option<Vec<Lun>> {
    let length = u32::from_be_bytes(*answer.first_chunk()?);
    let end = usize::try_from(length).ok()?.checked_add(HEADER)?;
    let (luns, rest) = answer.get(HEADER..end)?.as_chunks::<8>();
    rest.is_empty()
        .then(|| luns.iter().map(|wire| Lun::from_wire(*wire)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_taken_whole_or_not_at_all() {
        let mut answer = vec![0, 0, 0, 16, 0, 0, 0, 0];
        answer.extend([0, 1, 0, 0, 0, 0, 0, 0]);
        answer.extend([0x41, 0x2c, 0, 0, 0, 0, 0, 0]);
        let luns = whole_list(&answer).unwrap();
        assert_eq!(luns, [Lun::from_kernel(1), Lun::flat(300).unwrap()]);
        assert_eq!(whole_list(&answer[..23]), None);
        answer[3] = 12;
        assert_eq!(whole_list(&answer), None);
        assert_eq!(whole_list(&[0, 0, 0]), None);
        assert_eq!(whole_list(&[0; 8]).unwrap(), []);
        assert_eq!(whole_list(&[0xff; 24]), None);
    }
}
