//! Runs every seed of the fuzz targets, and changed seeds, through the fuzzed functions.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test panics to fail, and prints the seed of its random numbers"
)]

#[path = "fuzz_seeds/entry.rs"]
mod entry;
#[path = "fuzz_seeds/mutate.rs"]
mod mutate;

use mutate::run;

#[test]
fn no_seed_and_no_change_of_one_breaks_the_handshake() {
    run("handshake", entry::handshake);
}

#[test]
fn no_seed_and_no_change_of_one_breaks_the_uevent_parser() {
    run("uevent", entry::uevent);
}

#[test]
fn no_seed_and_no_change_of_one_breaks_the_nbd_uri_parser() {
    run("nbd_uri", entry::nbd_uri);
}

#[test]
fn no_seed_and_no_change_of_one_breaks_the_parsers_of_names() {
    run("id", entry::id);
}

#[test]
fn no_seed_and_no_change_of_one_breaks_the_iscsi_pdus() {
    run("iscsi_pdu", entry::iscsi_pdu);
}

#[test]
fn no_seed_and_no_change_of_one_breaks_the_iscsi_text() {
    run("iscsi_text", entry::iscsi_text);
}

#[test]
fn no_seed_and_no_change_of_one_breaks_the_iscsi_discovery() {
    run("iscsi_discovery", entry::iscsi_discovery);
}

#[test]
fn no_seed_and_no_change_of_one_breaks_the_kernels_iscsi_messages() {
    run("iscsi_netlink", entry::iscsi_netlink);
}

#[test]
fn no_seed_and_no_change_of_one_breaks_the_file_of_chap_secrets() {
    run("chap_file", entry::chap_file);
}

#[test]
fn no_seed_and_no_change_of_one_breaks_the_answers_of_device_mapper() {
    run("dm_answer", entry::dm_answer);
}

#[test]
fn no_seed_and_no_change_of_one_breaks_the_lists_of_mounts_and_swap_areas() {
    run("mounts", entry::mounts);
}

#[test]
fn no_seed_and_no_change_of_one_breaks_the_netlink_messages() {
    run("netlink_decode", entry::netlink_decode);
}

#[cfg(feature = "journal")]
#[test]
fn no_seed_and_no_change_of_one_breaks_the_journals_records() {
    run("journal_record", entry::journal_record);
}

#[cfg(feature = "cli")]
#[test]
fn no_seed_and_no_change_of_one_breaks_the_file_of_wanted_volumes() {
    run("desired_file", entry::desired_file);
}
