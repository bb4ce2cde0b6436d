//! Checks whether two connections lead to one volume: those that a device has and a new one,
//! or two new ones.
//!
//! No check of a few bytes proves that two volumes are one: it compares the first 68 KiB and
//! some [blocks](Places) that it chooses anew each time. It may not write, and other processes
//! may write meanwhile. So it reads the old side before and after the new one: each connection
//! to the volume serves the bytes that did not change meanwhile. A server that allows several
//! connections shares one cache among them (`proto.md`, `NBD_FLAG_CAN_MULTI_CONN`). For other
//! servers the names of the content decide.

mod places;

use std::time::Duration;

use crate::deadline::{Backoff, Deadline};
use crate::engine::Engine;
pub(in crate::engine) use crate::engine::nbd::same_volume::places::Places;
use crate::engine::nbd::same_volume::places::{Sample, first_difference_of};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::{NbdIndex, NbdUri};
use crate::nbd::{Connection, FirstBytes, NbdDevice, content_names_differ, describe_content_names};

/// The verdict from two reads of the old side and one of the new side between them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Same,
    Other,
    /// The volume was written to meanwhile, or one side could not be read.
    Unclear,
}

fn verdict(before: &Sample, new: &Sample, after: &Sample, shares_cache: bool) -> Verdict {
    if !shares_cache {
        return verdict_without_shared_cache(before, new, after);
    }
    let mut verdict = Verdict::Same;
    for place in 0..new.count() {
        let agrees = |old: &Sample| old.agrees_at(new, place);
        if agrees(before) || agrees(after) {
            continue;
        }
        let are_read = [before, new, after].iter().all(|side| side.has(place));
        if are_read && before.agrees_at(after, place) {
            return Verdict::Other;
        }
        verdict = Verdict::Unclear;
    }
    verdict
}

/// What one connection has written may be in the cache of that connection alone, so only the
/// first bytes are compared, and a common name is enough if they are not two devices of a btrfs.
fn verdict_without_shared_cache(before: &Sample, new: &Sample, after: &Sample) -> Verdict {
    const FIRST: usize = 0;
    if before.agrees_at(new, FIRST) || after.agrees_at(new, FIRST) {
        return Verdict::Same;
    }
    let (had, has) = (after.names(), new.names());
    if !had.is_empty() && !content_names_differ(&has, &had) {
        return Verdict::Same;
    }
    if before.agrees_at(after, FIRST) {
        return Verdict::Other;
    }
    Verdict::Unclear
}

/// What the comparison of an old side and a new one has shown.
enum Compared {
    /// The new side served the bytes of the old one.
    Same {
        new: Sample,
    },
    Other {
        old: Sample,
        new: Sample,
    },
    /// Each try was unclear.
    Unclear,
}

/// Compares what both sides serve until it is clear.
fn compare(
    mut read_old: impl FnMut() -> Result<Sample>,
    mut read_new: impl FnMut() -> Result<Sample>,
    shares_cache: bool,
    deadline: Deadline,
) -> Result<Compared> {
    const MOST_TRIES: u32 = 5;
    let mut pauses = Backoff::new(Duration::from_millis(10), Duration::from_millis(200));
    for _ in 0..MOST_TRIES {
        let before = read_old()?;
        let new = read_new()?;
        if before.agrees(&new) {
            return Ok(Compared::Same { new });
        }
        let after = read_old()?;
        match verdict(&before, &new, &after, shares_cache) {
            Verdict::Same => return Ok(Compared::Same { new }),
            Verdict::Other => return Ok(Compared::Other { old: after, new }),
            Verdict::Unclear => deadline.pause(pauses.pause()),
        }
    }
    Ok(Compared::Unclear)
}

/// Compares the volumes to which two new connections lead.
///
/// # Errors
/// `IdentityMismatch` at stage `identify` if they are two; `NotReady` if that stays unclear;
/// those of the reads.
pub(in crate::engine) fn require_one_volume(
    first: &Connection,
    second: &Connection,
    uri: &NbdUri,
    deadline: Deadline,
) -> Result<()> {
    let places = Places::choose(&first.export, first.export.size)?;
    let read = |connection| places.read_over(connection, deadline);
    match compare(|| read(first), || read(second), true, deadline)? {
        Compared::Same { .. } => Ok(()),
        Compared::Other { old, new } => {
            let message = format!(
                "the server of {uri} serves different volumes over two connections: one has {}, \
                 the other has {}; {}",
                describe_content_names(&old.names()),
                describe_content_names(&new.names()),
                where_they_differ(&places, &old, &new),
            );
            Err(is_another(message, &new))
        }
        Compared::Unclear => {
            let message = format!(
                "the bytes of {uri} change with each read, or a connection does not serve all of \
                 them: its server is not known to serve one volume over both connections"
            );
            Err(Error::new(ErrorKind::NotReady, message).at(Stage::Identify))
        }
    }
}

/// Compares the volume to which a new connection leads with that of a device that serves
/// I/O, and returns its first bytes.
///
/// # Errors
/// `IdentityMismatch` at stage `identify` if it is another volume; `NotReady` if either
/// first read fails, or if the comparison stays unclear; `TimedOut` if the device does not
/// answer.
pub(in crate::engine) fn require_same_volume(
    engine: &Engine,
    device: &NbdDevice,
    connection: &Connection,
    deadline: Deadline,
) -> Result<FirstBytes> {
    let index = device.index();
    let shares_cache = connection.export.can_multi_conn();
    let places = Places::choose(&connection.export, device.disk().size()?)?;
    let old = || sample_of(engine, device, &places, deadline);
    let new = || {
        let sample = places.read_over(connection, deadline)?;
        sample.require_first(|error| unread(index, error))
    };
    match compare(old, new, shares_cache, deadline)? {
        Compared::Same { new } => Ok(new.first_bytes()),
        Compared::Other { old, new } => {
            let message = format!(
                "the server of nbd{index} serves another volume on a new connection: that \
                 has {}, and the device has {}; {}",
                describe_content_names(&new.names()),
                describe_content_names(&old.names()),
                where_they_differ(&places, &old, &new),
            );
            Err(is_another(message, &new))
        }
        Compared::Unclear => Err(stays_unclear(index)),
    }
}

fn sample_of(
    engine: &Engine,
    device: &NbdDevice,
    places: &Places,
    deadline: Deadline,
) -> Result<Sample> {
    let read = places.read_of_device();
    let read = engine
        .nbd_reads
        .start(device, engine.roots(), deadline, read)?;
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

fn is_another(message: String, new: &Sample) -> Error {
    Error::new(ErrorKind::IdentityMismatch, message)
        .at(Stage::Identify)
        .with_found(&new.names())
}

fn where_they_differ(places: &Places, old: &Sample, new: &Sample) -> String {
    match first_difference_of(places, old, new) {
        Some(at) => format!("they differ in byte {at}"),
        None => "they differ".to_owned(),
    }
}

fn unread(index: NbdIndex, error: u32) -> Error {
    let message = format!(
        "the server of nbd{index} answers a read of the first bytes on a new connection with \
         error {error}: it is not known to serve the volume of the device"
    );
    Error::new(ErrorKind::NotReady, message).at(Stage::Identify)
}

fn stays_unclear(index: NbdIndex) -> Error {
    let message = format!(
        "the bytes of nbd{index} change with each read, or a read of a block fails on one side: \
         its server is not known to serve the same volume on a new connection"
    );
    Error::new(ErrorKind::NotReady, message).at(Stage::Identify)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first bytes of an ext4 file system with this UUID and this count of mounts.
    fn ext4(uuid: u8, mounts: u8) -> Sample {
        let mut bytes = vec![0; 4096];
        bytes[1080..1082].copy_from_slice(&[0x53, 0xef]);
        bytes[1128..1144].copy_from_slice(&[uuid; 16]);
        bytes[1076] = mounts;
        Sample::of(&bytes, &[])
    }

    fn unnamed(with: u8) -> Sample {
        Sample::of(&[with; 4096], &[])
    }

    #[test]
    fn bytes_that_did_not_change_meanwhile_are_those_of_the_volume_whatever_its_names_are() {
        let (one, again, other) = (ext4(1, 1), ext4(1, 2), ext4(2, 1));
        for shares_cache in [true, false] {
            assert_eq!(verdict(&one, &one, &one, shares_cache), Verdict::Same);
            assert_eq!(verdict(&one, &other, &one, shares_cache), Verdict::Other);
            // Written once, before or after the new connection was read.
            assert_eq!(verdict(&one, &one, &again, shares_cache), Verdict::Same);
            assert_eq!(verdict(&one, &again, &again, shares_cache), Verdict::Same);
            let (two, three) = (unnamed(2), unnamed(3));
            assert_eq!(verdict(&two, &three, &two, shares_cache), Verdict::Other);
        }
        // A copy of an image has the image's names. What one connection has written may be in
        // the cache of that connection alone.
        assert_eq!(verdict(&one, &again, &one, true), Verdict::Other);
        assert_eq!(verdict(&one, &again, &one, false), Verdict::Same);
    }

    #[test]
    fn another_device_of_the_same_btrfs_is_another_volume_also_without_a_shared_cache() {
        let device = |uuid: u8, generation: u8| {
            let mut bytes = vec![0; 68 * 1024];
            bytes[0x1_0040..0x1_0048].copy_from_slice(b"_BHRfS_M");
            bytes[0x1_0020..0x1_0030].fill(7);
            bytes[0x1_0048] = generation;
            bytes[0x1_010b..0x1_011b].fill(uuid);
            Sample::of(&bytes, &[])
        };
        let one = device(1, 1);
        assert_eq!(verdict(&one, &device(1, 2), &one, false), Verdict::Same);
        assert_eq!(verdict(&one, &device(2, 1), &one, false), Verdict::Other);
    }

    #[test]
    fn one_block_that_differs_shows_another_volume_and_one_that_is_written_to_hides_none() {
        let sample = |blocks: [Option<u8>; 3]| Sample::of(&[0; 4096], &blocks);
        let all = [Some(1), Some(1), Some(1)];
        for (before, new, after, expected) in [
            (all, all, all, Verdict::Same),
            (all, [Some(1), Some(2), Some(1)], all, Verdict::Other),
            // The second block is written to all the time.
            (
                all,
                [Some(1), Some(2), Some(1)],
                [Some(1), Some(3), Some(1)],
                Verdict::Unclear,
            ),
            (
                all,
                [Some(1), Some(2), Some(2)],
                [Some(1), Some(3), Some(1)],
                Verdict::Other,
            ),
            // Nothing contradicts where neither side can be read.
            ([None; 3], [None; 3], [None; 3], Verdict::Same),
            (all, [Some(1), None, Some(1)], all, Verdict::Unclear),
            ([None; 3], all, [None; 3], Verdict::Unclear),
        ] {
            let [before, new, after] = [before, new, after].map(sample);
            assert_eq!(verdict(&before, &new, &after, true), expected);
        }
    }

    #[test]
    fn bytes_that_change_meanwhile_prove_nothing_and_a_name_is_enough_without_a_shared_cache() {
        let (first, second, third) = (ext4(1, 1), ext4(1, 2), ext4(1, 3));
        assert_eq!(verdict(&first, &second, &third, true), Verdict::Unclear);
        assert_eq!(verdict(&first, &second, &third, false), Verdict::Same);
        assert_eq!(
            verdict(&first, &ext4(2, 2), &third, false),
            Verdict::Unclear
        );
        let [one, two, three] = [1, 2, 3].map(unnamed);
        assert_eq!(verdict(&one, &two, &three, false), Verdict::Unclear);
    }

    /// Compares a side whose reads return these samples in turn with one that serves `new`.
    fn compared(old: &[(u8, u8)], new: (u8, u8)) -> (Compared, usize) {
        let mut reads = 0;
        let of = |(uuid, mounts): (u8, u8)| Ok(ext4(uuid, mounts));
        let read_old = || {
            reads += 1;
            of(old[(reads - 1) % old.len()])
        };
        let limit = Deadline::after(Duration::from_secs(20));
        let compared = compare(read_old, || of(new), true, limit).unwrap();
        (compared, reads)
    }

    #[test]
    fn a_side_that_is_written_to_is_read_again_and_one_that_always_is_stays_unclear() {
        let (same, reads) = compared(&[(1, 1)], (1, 1));
        assert!(matches!(same, Compared::Same { .. }) && reads == 1);
        let (same, reads) = compared(&[(1, 1), (1, 2), (1, 3)], (1, 3));
        assert!(matches!(same, Compared::Same { .. }) && reads == 3);
        let (other, reads) = compared(&[(1, 1), (1, 2), (1, 3), (1, 3)], (1, 4));
        assert!(matches!(other, Compared::Other { .. }) && reads == 4);
        // Its names agree, and yet the new side may be a copy.
        let (unclear, reads) = compared(&[(1, 1), (1, 2)], (1, 3));
        assert!(matches!(unclear, Compared::Unclear) && reads == 10);
    }

    #[test]
    fn the_error_has_the_names_of_the_volume_on_the_new_connection() {
        let error = is_another("another".to_owned(), &ext4(2, 1));
        assert_eq!(error.found(), ["fs.02020202-0202-0202-0202-020202020202"]);
    }
}
