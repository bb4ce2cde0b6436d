//! The fuzzed functions: each takes any bytes and must not panic. It returns whether it
//! understood the bytes. The fuzz targets and the test of the seeds call the same functions.

use std::fs;
use std::io::{self, Read, Write};
use std::path::Path;
use std::time::Duration;

#[cfg(feature = "journal")]
use lunbd::engine::journal::Record;
use lunbd::id::{
    DevNo, DiskSeq, FcUri, Hctl, HostNo, Iqn, IscsiUri, Lun, NbdUri, Portal, SessionId, VolumeId,
    Wwid, Wwpn,
};
use lunbd::iscsi::pdu::{DEFAULT_DATA, HEADER, Lengths, Response};
use lunbd::iscsi::text::pairs;
use lunbd::iscsi::{Credentials, DiscoveryOptions, Secret, chap, discover_over};
use lunbd::kernel::mounts::{read_mounts, read_swaps};
use lunbd::nbd::{self, handshake};
#[cfg(feature = "cli")]
use lunbd::reconcile::Desired;
use lunbd::uevent::Message;
use lunbd::{Deadline, ErrorKind, Roots, Source};
use lunbd_sys::dm::read_targets;
use lunbd_sys::iscsi::{answer, event, messages};

/// A server that sends these bytes and then closes.
struct Canned<'a>(&'a [u8]);

impl Read for Canned<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl Write for Canned<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Everything that a server sends in a handshake, and its interpretation.
pub(crate) fn handshake(bytes: &[u8]) -> bool {
    let deadline = Deadline::after(Duration::from_secs(60));
    let listed = handshake::list(&mut Canned(bytes), deadline);
    let _discovered = handshake::discover(&mut Canned(bytes), deadline);
    let mut server = Canned(bytes);
    let negotiated = handshake::negotiate(&mut server, "export", deadline);
    let understood = listed.is_ok() || negotiated.is_ok();
    match negotiated {
        Ok(export) => {
            assert!(export.size > 0 && i64::try_from(export.size).is_ok());
            assert!(export.differences_from(&export).is_empty());
            for page_size in [4096, 65_536] {
                if let Ok(geometry) = export.geometry(page_size, None) {
                    assert_eq!(geometry.size % u64::from(geometry.block_size), 0);
                    assert!((512..=page_size).contains(&geometry.block_size));
                }
            }
        }
        Err(error) => {
            let shown = format!("{error:#}");
            assert!(!shown.contains(char::is_control), "{shown:?}");
            assert!(shown.len() < 4096, "{shown:?}");
        }
    }
    understood
}

/// One PDU of an iSCSI target.
pub(crate) fn iscsi_pdu(bytes: &[u8]) -> bool {
    let Some((header, rest)) = bytes.split_first_chunk::<HEADER>() else {
        return false;
    };
    if let Ok(lengths) = Lengths::decode(header, DEFAULT_DATA) {
        assert!(lengths.following() <= 8192 + 1020);
        let mut following = rest.get(..lengths.following()).unwrap_or(rest).to_vec();
        lengths.keep_data(&mut following);
        assert!(following.len() <= 8192);
    }
    match Response::decode(header) {
        Ok(_) => true,
        Err(error) => {
            assert!(!error.to_string().contains(char::is_control));
            false
        }
    }
}

/// Keys and values, including the binary ones of CHAP.
pub(crate) fn iscsi_text(bytes: &[u8]) -> bool {
    let mut understood = false;
    for pair in pairs(bytes) {
        match pair {
            Ok(pair) => {
                understood = true;
                assert!(!pair.key.is_empty() && pair.key.len() <= 63);
                assert!(!pair.value.contains(char::is_control));
                let _ = (pair.number(0..=255), pair.boolean(), pair.answer());
                if let Ok(bytes) = chap::decode_binary(&pair, 1024) {
                    assert!((1..=1024).contains(&bytes.len()));
                }
            }
            Err(error) => assert!(!format!("{error:#}").contains(char::is_control)),
        }
    }
    understood
}

/// Everything that an iSCSI target sends during discovery. The first byte says whether and how
/// CHAP is used. The ISIDs in the answers are random, so they are corrected.
pub(crate) fn iscsi_discovery(bytes: &[u8]) -> bool {
    let Some((kind, bytes)) = bytes.split_first() else {
        return false;
    };
    let secret = |text| Secret::new(text).unwrap();
    let me = "iqn.2026-01.example:me".parse().unwrap();
    let mut options = DiscoveryOptions::new(me);
    if kind & 1 != 0 {
        let mut credentials = Credentials::new("me", secret("mine")).unwrap();
        if kind & 2 != 0 {
            credentials = credentials.mutual(None, secret("its")).unwrap();
        }
        options = options.credentials(credentials);
    }
    let mut target = Echoing {
        said: bytes,
        isid: [0; 6],
    };
    let portal = "10.0.0.1".parse().unwrap();
    let deadline = Deadline::after(Duration::from_secs(60));
    match discover_over(&mut target, &portal, &options, deadline) {
        Ok(found) => {
            for record in found.skipped {
                let shown = record.to_string();
                assert!(!shown.contains(char::is_control), "{shown:?}");
                assert!(shown.len() < 4096, "{shown:?}");
            }
            true
        }
        Err(error) => {
            let shown = format!("{error:#}");
            assert!(!shown.contains(char::is_control), "{shown:?}");
            assert!(shown.len() < 4096, "{shown:?}");
            false
        }
    }
}

/// A target that sends these bytes and then closes. Each header of a login response gets the
/// ISID of the request.
struct Echoing<'a> {
    said: &'a [u8],
    isid: [u8; 6],
}

impl Read for Echoing<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.said.read(buffer)?;
        if read == HEADER && buffer[0] == 0x23 {
            buffer[8..14].copy_from_slice(&self.isid);
        }
        Ok(read)
    }
}

impl Write for Echoing<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(isid) = bytes.get(8..14) {
            self.isid.copy_from_slice(isid);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A kernel uevent.
pub(crate) fn uevent(bytes: &[u8]) -> bool {
    let Ok(message) = Message::parse(bytes) else {
        return false;
    };
    assert_eq!(message.property("ACTION"), Some(message.action));
    assert_eq!(message.property("DEVPATH"), Some(message.devpath));
    true
}

/// An NBD URI, alone and as a source.
pub(crate) fn nbd_uri(bytes: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return false;
    };
    let Ok(uri) = text.parse::<NbdUri>() else {
        return false;
    };
    let printed = uri.to_string();
    assert!(printed.bytes().all(|byte| byte.is_ascii_graphic()));
    assert_eq!(printed.parse::<NbdUri>().as_ref(), Ok(&uri));
    assert_eq!(printed.parse(), Ok(Source::Nbd(uri)));
    true
}

/// Every other name that is parsed; each must print what it parses.
pub(crate) fn id(bytes: &[u8]) -> bool {
    fn roundtrip<T>(text: &str) -> bool
    where
        T: std::str::FromStr + std::fmt::Display + PartialEq,
    {
        let Ok(id) = text.parse::<T>() else {
            return false;
        };
        assert!(id.to_string().parse::<T>().is_ok_and(|again| again == id));
        true
    }
    let Ok(text) = std::str::from_utf8(bytes) else {
        return false;
    };
    [
        roundtrip::<DevNo>(text),
        roundtrip::<DiskSeq>(text),
        roundtrip::<HostNo>(text),
        roundtrip::<Hctl>(text),
        roundtrip::<Lun>(text),
        roundtrip::<Wwid>(text),
        roundtrip::<Iqn>(text),
        roundtrip::<Portal>(text),
        roundtrip::<SessionId>(text),
        roundtrip::<Wwpn>(text),
        roundtrip::<IscsiUri>(text),
        roundtrip::<FcUri>(text),
        roundtrip::<Source>(text),
        roundtrip::<VolumeId>(text),
    ]
    .contains(&true)
}

/// A file of the journal, and the same bytes below a first line that is right.
#[cfg(feature = "journal")]
pub(crate) fn journal_record(bytes: &[u8]) -> bool {
    let mut understood = false;
    for bytes in [bytes.to_vec(), Record::seal(bytes)] {
        if let Ok(record) = Record::parse(&bytes) {
            assert!(!record.spec.sources.is_empty());
            let again = record.to_bytes().map(|bytes| Record::parse(&bytes));
            assert!(again.is_ok_and(|again| again.as_ref() == Ok(&record)));
            understood = true;
        }
    }
    understood
}

/// A message of NBD's netlink family, after the byte that is its command. What
/// is decoded must be the same after it is encoded and decoded again.
pub(crate) fn netlink_decode(bytes: &[u8]) -> bool {
    let Some((command, bytes)) = bytes.split_first() else {
        return false;
    };
    let Ok(message) = nbd::Message::decode(*command, bytes) else {
        return false;
    };
    // A nest of short items may be too long for one attribute when it is whole.
    if bytes.len() < 16 << 10 {
        let again = nbd::Message::decode(*command, &message.encode());
        assert_eq!(again.ok(), Some(message));
    }
    true
}

/// A datagram of the kernel's iSCSI netlink.
pub(crate) fn iscsi_netlink(bytes: &[u8]) -> bool {
    let (mut length, mut understood) = (0, false);
    for message in messages(bytes) {
        length += message.len();
        understood |= answer(message).is_some() || event(message).is_some();
    }
    assert!(length <= bytes.len());
    understood
}

/// The kernel's answer to `DM_TABLE_STATUS`.
pub(crate) fn dm_answer(bytes: &[u8]) -> bool {
    let Ok(targets) = read_targets(bytes) else {
        return false;
    };
    // Each target begins after the one before it.
    assert!(targets.len() <= bytes.len());
    for target in &targets {
        assert!(target.kind.chars().count() <= 16);
        assert!(!target.parameters.contains('\0'));
    }
    !targets.is_empty()
}

/// A file whose content changes with each input, in memory if possible.
fn with_file<T>(bytes: &[u8], name: &str, use_it: impl FnOnce(&Path) -> T) -> T {
    thread_local! {
        static FOLDER: tempfile::TempDir =
            tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    }
    FOLDER.with(|folder| {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, bytes).unwrap();
        use_it(folder.path())
    })
}

/// The mounts and swap areas that `/proc` lists.
pub(crate) fn mounts(bytes: &[u8]) -> bool {
    let lines = bytes.split(|byte| *byte == b'\n').count();
    let deadline = Deadline::after(Duration::from_secs(60));
    let mounts = with_file(bytes, "proc/self/mountinfo", |root| {
        read_mounts(&Roots::below(root), deadline).unwrap().found
    });
    assert!(mounts.len() <= lines);
    assert!(mounts.iter().all(|mount| mount.pid.is_none()));
    let swaps = with_file(bytes, "proc/swaps", |root| {
        read_swaps(&Roots::below(root), deadline).unwrap().found
    });
    // The first line is a heading.
    assert!(swaps.len() < lines);
    !mounts.is_empty()
}

/// The file of CHAP secrets.
pub(crate) fn chap_file(bytes: &[u8]) -> bool {
    with_file(bytes, "chap", |root| {
        let path = root.join("chap");
        match Credentials::from_file(&path) {
            Ok(_) => true,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::InvalidInput);
                let shown = error.to_string();
                assert!(!shown.contains(char::is_control), "{shown:?}");
                assert!(shown.len() < 1024, "{shown:?}");
                false
            }
        }
    })
}

/// The file of the wanted volumes.
#[cfg(feature = "cli")]
pub(crate) fn desired_file(bytes: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return false;
    };
    let Ok(desired) = toml::from_str::<Desired>(text) else {
        return false;
    };
    assert_eq!(desired.iter().count(), desired.len());
    for (volume, spec) in desired.iter() {
        assert!(!spec.sources.is_empty());
        assert_eq!(desired.get(volume), Some(spec));
    }
    !desired.is_empty()
}
