//! Every seed of the fuzz targets (`tests/fuzz`), through what they call.
#![allow(missing_docs, clippy::unwrap_used, reason = "a test panics to fail")]

#[path = "fuzz_seeds/entry.rs"]
mod entry;

use std::fs;
use std::path::Path;

/// Runs each seed of this target, and each beginning of it.
fn run(target: &str, entry: fn(&[u8])) {
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz_seeds");
    let mut ran = 0;
    for seed in fs::read_dir(seeds.join(target)).unwrap() {
        let bytes = fs::read(seed.unwrap().path()).unwrap();
        for length in 0..=bytes.len() {
            entry(&bytes[..length]);
        }
        ran += 1;
    }
    assert!(ran > 0, "{target} has no seeds");
}

#[test]
fn no_seed_breaks_the_handshake() {
    run("handshake", entry::handshake);
}

#[test]
fn no_seed_breaks_the_uevent_parser() {
    run("uevent", entry::uevent);
}

#[test]
fn no_seed_breaks_the_nbd_uri_parser() {
    run("nbd_uri", entry::nbd_uri);
}

#[test]
fn no_seed_breaks_the_parsers_of_names() {
    run("id", entry::id);
}

#[test]
fn no_seed_breaks_the_iscsi_pdus() {
    run("iscsi_pdu", entry::iscsi_pdu);
}

#[test]
fn no_seed_breaks_the_iscsi_text() {
    run("iscsi_text", entry::iscsi_text);
}

#[test]
fn no_seed_breaks_the_iscsi_discovery() {
    run("iscsi_discovery", entry::iscsi_discovery);
}

#[test]
fn no_seed_breaks_the_netlink_messages() {
    run("netlink_decode", entry::netlink_decode);
}

#[cfg(feature = "journal")]
#[test]
fn no_seed_breaks_the_journals_records() {
    run("journal_record", entry::journal_record);
}
