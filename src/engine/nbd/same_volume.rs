//! Checks whether a new connection leads to the device's volume: it reads the device over
//! the connections that the device has, and the volume over the new one.
//!
//! The check may not write, and other processes may write meanwhile. So it reads the device
//! before and after: each connection to the volume serves the bytes that did not change
//! meanwhile. A server that allows several connections shares one cache among them
//! (`proto.md`, `NBD_FLAG_CAN_MULTI_CONN`). For other servers the names of the content decide.

use std::time::Duration;

use crate::deadline::{Backoff, Deadline};
use crate::engine::Engine;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::NbdIndex;
use crate::kernel::blockdev::BlockDevice;
use crate::nbd::{self, Connection, FirstBytes, NbdDevice, is_other_content, spelt_content};

/// The verdict from two reads of a device and one of a new connection between them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Same,
    Other,
    /// The device was written to meanwhile.
    Unclear {
        /// The new connection leads to content with a name that the device has.
        keeps_a_name: bool,
    },
}

fn judge(before: &[u8], new: &[u8], after: &[u8], shares_cache: bool) -> Verdict {
    let agrees = |bytes: &[u8]| first_difference(bytes, new).is_none();
    if agrees(before) || agrees(after) {
        return Verdict::Same;
    }
    let (had, has) = (nbd::content_names(after), nbd::content_names(new));
    let keeps_a_name = !had.is_empty() && !is_other_content(&has, &had);
    match before == after {
        true if keeps_a_name && !shares_cache => Verdict::Same,
        true => Verdict::Other,
        false => Verdict::Unclear { keeps_a_name },
    }
}

/// The first position at which the bytes that both have differ.
fn first_difference(one: &[u8], other: &[u8]) -> Option<usize> {
    one.iter().zip(other).position(|(one, other)| one != other)
}

impl Engine {
    /// Compares the volume to which a new connection leads with that of a device that serves
    /// I/O, and returns its first bytes.
    ///
    /// # Errors
    /// `IdentityMismatch` at stage `identify` if it is another volume; `NotReady` if either
    /// read fails, or if the device is written to all the time and has no name; `TimedOut` if
    /// the device does not answer.
    pub(in crate::engine) fn require_same_volume(
        &self,
        device: &NbdDevice,
        connection: &Connection,
        deadline: Deadline,
    ) -> Result<FirstBytes> {
        const MOST_TRIES: u32 = 5;
        let mut pauses = Backoff::new(Duration::from_millis(10), Duration::from_millis(200));
        let index = device.index();
        let shares_cache = connection.export.can_multi_conn();
        let mut before = self.first_bytes_of(device, deadline)?;
        let mut tries = 0;
        loop {
            let answer = connection.first_bytes(deadline)?;
            let new = answer.map_err(|error| unread(index, error))?;
            if first_difference(&before, &new).is_none() {
                return Ok(FirstBytes::of(&new));
            }
            let after = self.first_bytes_of(device, deadline)?;
            tries += 1;
            match judge(&before, &new, &after, shares_cache) {
                Verdict::Other => return Err(is_another(index, &after, &new)),
                Verdict::Unclear { .. } if tries < MOST_TRIES => {}
                Verdict::Unclear {
                    keeps_a_name: false,
                } => return Err(always_written(index)),
                Verdict::Same | Verdict::Unclear { .. } => return Ok(FirstBytes::of(&new)),
            }
            deadline.pause(pauses.pause());
            before = self.first_bytes_of(device, deadline)?;
        }
    }

    fn first_bytes_of(&self, device: &NbdDevice, deadline: Deadline) -> Result<Vec<u8>> {
        let length = usize::try_from(nbd::CONTENT_LENGTH).unwrap_or(usize::MAX);
        let read = move |disk: &BlockDevice, roots: &_| disk.read_first_bytes(roots, length);
        let read = self.nbd_reads.start(device, self.roots(), deadline, read)?;
        let answer = read.and_then(|read| read.wait(deadline));
        answer.unwrap_or_else(|| {
            let what = format!(
                "a read of nbd{} over the connections that it has",
                device.index()
            );
            let error = Error::timed_out(Stage::Identify, deadline, &what);
            Err(error.with_last_seen(device.disk().describe()))
        })
    }
}

fn is_another(index: NbdIndex, has: &[u8], new: &[u8]) -> Error {
    let at = first_difference(has, new).unwrap_or_default();
    let message = format!(
        "the server of nbd{index} serves another volume on a new connection: that has {}, and the \
         device has {}; they differ from byte {at} on",
        spelt_content(&nbd::content_names(new)),
        spelt_content(&nbd::content_names(has)),
    );
    Error::new(ErrorKind::IdentityMismatch, message)
        .at(Stage::Identify)
        .with_found(&nbd::content_names(new))
}

fn unread(index: NbdIndex, error: u32) -> Error {
    let message = format!(
        "the server of nbd{index} answers a read of the first bytes on a new connection with \
         error {error}: it is not known to serve the volume of the device"
    );
    Error::new(ErrorKind::NotReady, message).at(Stage::Identify)
}

fn always_written(index: NbdIndex) -> Error {
    let message = format!(
        "the first bytes of nbd{index} change with each read and have no name: its server is not \
         known to serve the same volume on a new connection"
    );
    Error::new(ErrorKind::NotReady, message).at(Stage::Identify)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first bytes of an ext4 file system with this UUID and this count of mounts.
    fn ext4(uuid: u8, mounts: u8) -> Vec<u8> {
        let mut bytes = vec![0; 4096];
        bytes[1080..1082].copy_from_slice(&[0x53, 0xef]);
        bytes[1128..1144].copy_from_slice(&[uuid; 16]);
        bytes[1076] = mounts;
        bytes
    }

    #[test]
    fn bytes_that_did_not_change_meanwhile_are_those_of_the_volume_whatever_its_names_are() {
        let (one, again, other) = (ext4(1, 1), ext4(1, 2), ext4(2, 1));
        for shares_cache in [true, false] {
            assert_eq!(judge(&one, &one, &one, shares_cache), Verdict::Same);
            assert_eq!(judge(&one, &other, &one, shares_cache), Verdict::Other);
            // Written once, before or after the new connection was read.
            assert_eq!(judge(&one, &one, &again, shares_cache), Verdict::Same);
            assert_eq!(judge(&one, &again, &again, shares_cache), Verdict::Same);
            // Neither has a name.
            let (two, three) = ([2; 4096], [3; 4096]);
            assert_eq!(judge(&two, &three, &two, shares_cache), Verdict::Other);
        }
        // A copy of an image has the image's names. What one connection has written may be in
        // the cache of that connection alone.
        assert_eq!(judge(&one, &again, &one, true), Verdict::Other);
        assert_eq!(judge(&one, &again, &one, false), Verdict::Same);
    }

    #[test]
    fn the_error_has_the_names_of_the_volume_on_the_new_connection() {
        let error = is_another("7".parse().unwrap(), &ext4(1, 1), &ext4(2, 1));
        assert_eq!(error.found(), ["fs.02020202-0202-0202-0202-020202020202"]);
    }

    #[test]
    fn bytes_that_change_meanwhile_prove_nothing_alone() {
        let (first, second, third) = (ext4(1, 1), ext4(1, 2), ext4(1, 3));
        let unclear = |keeps_a_name| Verdict::Unclear { keeps_a_name };
        assert_eq!(judge(&first, &second, &third, true), unclear(true));
        assert_eq!(judge(&first, &ext4(2, 2), &third, true), unclear(false));
        let (one, two, three) = ([1; 4096], [2; 4096], [3; 4096]);
        assert_eq!(judge(&one, &two, &three, true), unclear(false));
    }

    #[test]
    fn a_device_that_is_shorter_than_the_read_is_compared_as_far_as_it_goes() {
        assert_eq!(first_difference(&[1, 2], &[1, 2, 3]), None);
        assert_eq!(first_difference(&[1, 2], &[1, 3, 3]), Some(1));
    }
}
