//! A dial leaves no descriptor behind. The test is alone in its process, because it counts the
//! descriptors of the whole process.
#![allow(clippy::unwrap_used, reason = "a test panics to fail")]

mod nbd_server;

use std::fs;
use std::time::Duration;

use lunbd::{Deadline, nbd};
use nbd_server::bytes::*;
use nbd_server::{Server, Step, until_go, with};

fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn neither_a_dial_that_failed_nor_one_that_was_dropped_leaves_a_descriptor() {
    let scripts = [
        vec![],
        vec![Step::Send(b"HTTP/1.1 400 Bad Request".to_vec())],
        vec![Step::Hang],
        with(
            until_go(),
            [Step::Send(reply(OPT_GO, ERR_UNKNOWN, b"none"))],
        ),
        with(
            until_go(),
            [Step::Send(reply_of_length(OPT_GO, REP_INFO, u32::MAX, b""))],
        ),
        with(until_go(), [Step::Send(go(1 << 30, FLAGS))]),
    ];
    let round = || {
        for script in &scripts {
            for server in [Server::tcp(script.clone()), Server::unix(script.clone())] {
                // Only the server that hangs must cause a timeout.
                let hangs = matches!(script[..], [Step::Hang]);
                // The limit is long enough to reach the server, which waits for the client, on
                // a busy machine.
                let limit = if hangs { 1_500 } else { 30_000 };
                let deadline = Deadline::after(Duration::from_millis(limit));
                drop(nbd::dial(&server.uri("a"), deadline));
                server.finish();
            }
        }
    };
    round();
    let before = descriptors();
    for _ in 0..5 {
        round();
    }
    assert_eq!(descriptors(), before);
}
