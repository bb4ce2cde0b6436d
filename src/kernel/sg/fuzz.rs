//! The fuzz target for the answers to SCSI commands, whose parsers are private.

use lunbd_sys::sg::{Completion, Info};

use super::inquiry::{Page, page_in};
use super::sense::is_refused;
use super::{LONGEST, capacity, failed, outcome, port_groups, presence, report_luns};

/// Parses `bytes` as a device's answer to each command and as sense data. Three
/// of the first four bytes are the statuses, and the fourth is the code of a VPD
/// page. Returns whether the answer holds that page.
///
/// # Panics
/// If a parser breaks its promise.
pub fn sg_reply(bytes: &[u8]) -> bool {
    let Some(([status, host_status, driver_status, code], answer)) = bytes.split_first_chunk()
    else {
        return false;
    };
    let mut understood = false;
    for allocation in [255, LONGEST] {
        match page_in(answer, *code, allocation) {
            Ok(Page::Complete(page)) => {
                assert!(page.len() >= 4 && page.len() <= answer.len());
                understood = true;
            }
            // Each try asks for more, so the tries end.
            Ok(Page::Truncated(longer)) => assert!(longer > allocation && longer <= LONGEST),
            Err(error) => assert!(!error.to_string().contains(char::is_control)),
        }
    }
    if let Some(luns) = report_luns::whole_list(answer) {
        assert_eq!(luns.len(), (answer.len() - 8).min(luns.len() * 8) / 8);
    }
    if let Some(groups) = port_groups::port_groups(answer) {
        assert!(groups.len() <= answer.len() / 8);
    }
    for size in [capacity::long_form(answer), capacity::short_form(answer)] {
        assert!(size.is_none_or(|size| size > 0));
    }
    if let Some(first) = answer.first() {
        let _ = presence::reports_no_unit(*first);
    }
    for info in [Info::empty(), Info::CHECK] {
        let done = Completion {
            transferred: answer.len(),
            status: *status,
            host_status: u16::from(*host_status),
            driver_status: u16::from(*driver_status),
            info,
            sense: answer.get(..64).unwrap_or(answer).to_vec(),
        };
        let _ = (outcome(&done), is_refused(&done));
        assert!(
            !failed("INQUIRY", &done)
                .to_string()
                .contains(char::is_control)
        );
    }
    understood
}

#[cfg(test)]
#[path = "../../../tests/fuzz_seeds/mutate.rs"]
#[allow(
    clippy::print_stdout,
    reason = "a test prints the seed of its random numbers"
)]
mod mutate;

#[cfg(test)]
mod tests {
    #[test]
    fn no_seed_and_no_change_of_one_breaks_the_answers_to_scsi_commands() {
        super::mutate::run("sg_reply", super::sg_reply);
    }
}
