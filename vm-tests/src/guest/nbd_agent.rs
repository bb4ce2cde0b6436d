//! The NBD calls of an agent that links `lunbd`, and what sysfs shows of its devices.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::time::Duration;

use lunbd::engine::{HealOutcome, HealReport, NbdOptions};
use lunbd::{AttachRequest, Attachment, Engine, ErrorKind, Source};

use super::agent::soon;

/// The source with this URI.
///
/// # Panics
/// If it is none.
#[must_use]
pub fn source(uri: &str) -> Source {
    uri.parse().expect("a source")
}

/// Attaches a source with the defaults.
///
/// # Panics
/// If it cannot be attached.
pub fn attach(engine: &Engine, uri: &str) -> Attachment {
    attach_with(engine, uri, &NbdOptions::default())
}

/// As [`attach`], with these options.
///
/// # Panics
/// If it cannot be attached.
pub fn attach_with(engine: &Engine, uri: &str, options: &NbdOptions) -> Attachment {
    let request = AttachRequest::new(source(uri)).nbd(options.clone());
    engine.attach(&request, soon()).expect("an attach")
}

/// Detaches a source that is attached.
///
/// # Panics
/// If it is not attached, or cannot be detached.
pub fn detach(engine: &Engine, uri: &str) {
    let detachment = engine.detach(source(uri), soon()).expect("a detach");
    assert!(detachment.changed);
}

/// Heals the one device that there is.
///
/// # Panics
/// If there is another number of devices.
#[must_use]
pub fn heal(engine: &Engine) -> HealReport {
    let healings = engine.heal(soon()).expect("a heal");
    let [healing] = <[HealReport; 1]>::try_from(healings).expect("one device");
    healing
}

/// Repeats a heal while its dial of a further connection times out. A heal gives a connection
/// that may not be needed two seconds, and a machine that stalls may exceed them.
///
/// # Panics
/// If each heal of a minute times out.
#[must_use]
pub fn healed_in_time(mut heal: impl FnMut() -> HealReport) -> HealReport {
    let is_late = |healing: &HealReport| {
        matches!(&healing.outcome, HealOutcome::Degraded(error)
            if error.kind() == ErrorKind::TimedOut)
    };
    let limit = Duration::from_secs(60);
    super::wait_until("a heal that does not time out", limit, || {
        Some(heal()).filter(|healing| !is_late(healing))
    })
}

/// An attribute of the device; an empty string if sysfs does not show it.
#[must_use]
pub fn attribute(attachment: &Attachment, name: &str) -> String {
    let device = attachment.node.file_name().expect("a node");
    let text = fs::read_to_string(Path::new("/sys/block").join(device).join(name));
    text.unwrap_or_default().trim().to_owned()
}

/// # Panics
/// If the device is connected or has a size.
#[track_caller]
pub fn assert_free(attachment: &Attachment) {
    assert_eq!(attribute(attachment, "pid"), "");
    assert_eq!(attribute(attachment, "size"), "0");
}

/// The names of the connected devices, sorted.
#[must_use]
pub fn connected() -> Vec<String> {
    let mut names = super::entries("/sys/block");
    names.retain(|name| Path::new(&format!("/sys/block/{name}/pid")).exists());
    names.sort();
    names
}

/// As many bytes of chance.
///
/// # Panics
/// If the kernel has none.
#[must_use]
pub fn random(length: usize) -> Vec<u8> {
    let mut data = vec![0; length];
    let mut source = File::open("/dev/urandom").expect("urandom");
    source.read_exact(&mut data).expect("bytes");
    data
}
