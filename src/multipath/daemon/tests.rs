use std::io::{Read as _, Write as _};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use nix::sys::socket::{self, Backlog};

use super::*;

fn listen() -> (Daemon, UnixListener) {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("lunbd-test-multipathd-{}-{number}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let listener = UnixListener::bind_addr(&address).unwrap();
    let socket = Socket::Abstract(name);
    (Daemon { socket }, listener)
}

fn heard(stream: &mut UnixStream) -> String {
    wire::receive(stream).unwrap()
}

/// A daemon that answers one connection after the other with these bytes; the thread
/// returns the commands that it received.
fn answering(replies: Vec<Vec<u8>>) -> (Daemon, thread::JoinHandle<Vec<String>>) {
    let (daemon, listener) = listen();
    let thread = thread::spawn(move || {
        let answer = |reply: Vec<u8>| {
            let (mut stream, _) = listener.accept().unwrap();
            let command = heard(&mut stream);
            let _the_client_may_have_left = stream.write_all(&reply);
            command
        };
        replies.into_iter().map(answer).collect()
    });
    (daemon, thread)
}

fn packet(text: &str) -> Vec<u8> {
    let mut packet = Vec::new();
    wire::send(&mut packet, text).unwrap();
    packet
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(30))
}

#[test]
fn each_reply_is_an_answer_or_an_error_of_its_own_kind() {
    for (reply, expected) in [
        ("ok\n", Ok(Answer::Done)),
        ("blacklisted\n", Ok(Answer::Excluded)),
        ("blacklisted\nfail\n", Ok(Answer::Excluded)),
        ("delayed\n", Ok(Answer::Delayed)),
        ("delayedfail\n", Ok(Answer::Delayed)),
        ("fail\n", Err(ErrorKind::Refused)),
        ("map reload error. removed\n", Err(ErrorKind::Refused)),
        (
            "permission deny: need to be root\n",
            Err(ErrorKind::NotPermitted),
        ),
        (
            "add path sda: not found\nmultipath-tools v0\n",
            Err(ErrorKind::Refused),
        ),
        ("", Err(ErrorKind::Refused)),
    ] {
        let (daemon, told) = answering(vec![packet(reply)]);
        let answer = daemon.add_path("sda", soon());
        let kind = answer.as_ref().map_err(Error::kind);
        assert_eq!(kind.copied(), expected, "{reply:?}");
        assert_eq!(told.join().unwrap(), ["add path sda"]);
        if let Err(error) = answer {
            assert_eq!(error.stage(), Some(Stage::Map));
            assert!(error.to_string().contains("add path sda"), "{error}");
        }
    }
}

#[test]
fn a_path_that_multipathd_does_not_know_counts_as_deleted_after_a_fail_reply() {
    let (daemon, told) = answering(vec![packet("fail\n"), packet("sda\nsdaa\n")]);
    assert_eq!(daemon.delete_path("sdb", soon()).unwrap(), Answer::Done);
    let commands = told.join().unwrap();
    assert_eq!(commands, ["del path sdb", "show paths raw format %d"]);
    let (daemon, _told) = answering(vec![packet("fail\n"), packet("sda\nsdb\n")]);
    let error = daemon.delete_path("sdb", soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused);
    assert!(error.to_string().contains("fail"), "{error}");
}

#[test]
fn a_path_is_known_by_its_whole_name_alone_and_a_refusal_is_no_list() {
    for (reply, expected) in [
        ("sda\nsdb\n", Ok(true)),
        ("sdaa\nsdab\n", Ok(false)),
        ("ok\n", Ok(false)),
        ("", Ok(false)),
        ("fail\n", Err(ErrorKind::Refused)),
        ("show: not found\n sda\n", Err(ErrorKind::Refused)),
    ] {
        let (daemon, _told) = answering(vec![packet(reply)]);
        let known = daemon.knows_path("sda", soon());
        assert_eq!(known.map_err(|error| error.kind()), expected, "{reply:?}");
    }
}

#[test]
fn the_list_of_multipathd_gives_the_unit_name_of_each_disk_that_has_one() {
    let list = "sda/36001405\nsdb/[undef]\nsdc/\nsdd/1LIO-ORG_a/b\n";
    let (daemon, told) = answering(vec![packet(list), packet("ok\n"), packet("fail\n")]);
    let wwids: Vec<_> = daemon.wwids(soon()).unwrap().into_iter().collect();
    let expected = [("sda", "36001405"), ("sdd", "1LIO-ORG_a/b")];
    assert_eq!(wwids, expected.map(|(a, b)| (a.to_owned(), b.to_owned())));
    // This is the reply if there is no path.
    assert_eq!(daemon.wwids(soon()).unwrap(), BTreeMap::new());
    let error = daemon.wwids(soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused);
    assert_eq!(told.join().unwrap(), ["show paths raw format %d/%w"; 3]);
}

#[test]
fn a_daemon_with_a_socket_in_run_is_found_only_while_it_listens() {
    let directory = tempfile::tempdir().unwrap();
    let roots = Roots::below(directory.path());
    std::fs::create_dir(&roots.run).unwrap();
    assert_eq!(Daemon::find(&roots).unwrap(), None);
    let listener = UnixListener::bind(roots.run.join(FILE)).unwrap();
    let daemon = Daemon::find(&roots).unwrap().unwrap();
    let answers = thread::spawn(move || {
        // The first connection comes from the search for the daemon.
        for (mut stream, _) in (0..2).map(|_| listener.accept().unwrap()) {
            let _closed = wire::receive(&mut stream).map(|_| stream.write_all(&packet("ok\n")));
        }
    });
    assert_eq!(daemon.add_path("sda", soon()).unwrap(), Answer::Done);
    answers.join().unwrap();
    assert!(roots.run.join(FILE).exists());
    assert_eq!(Daemon::find(&roots).unwrap(), None);
}

#[test]
fn a_busy_daemon_is_asked_again_until_the_deadline_except_for_a_delete() {
    let busy = || packet("timeout\n");
    let (daemon, told) = answering(vec![busy(), busy(), packet("ok\n")]);
    assert_eq!(daemon.add_path("sda", soon()).unwrap(), Answer::Done);
    assert_eq!(told.join().unwrap(), ["add path sda"; 3]);
    let (daemon, told) = answering(vec![busy(), packet("sda\n")]);
    assert!(daemon.knows_path("sda", soon()).unwrap());
    assert_eq!(told.join().unwrap().len(), 2);

    let (daemon, told) = answering(vec![busy()]);
    let error = daemon.delete_path("sda", soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotReady);
    assert_eq!(told.join().unwrap(), ["del path sda"]);

    let (daemon, _told) = answering((0..100).map(|_| busy()).collect());
    let deadline = Deadline::after(Duration::from_millis(50));
    let error = daemon.add_path("sda", deadline).unwrap_err();
    let kinds = [ErrorKind::NotReady, ErrorKind::TimedOut];
    assert!(kinds.contains(&error.kind()), "{error}");
    assert!(deadline.has_passed());
}

#[test]
fn a_path_name_that_is_not_one_short_plain_word_is_refused() {
    let (daemon, listener) = listen();
    for name in ["", "a b", "a\n", "\"", "a\0", &"x".repeat(128)] {
        let error = daemon.delete_path(name, soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{name:?}");
    }
    listener.set_nonblocking(true).unwrap();
    let none = listener.accept().unwrap_err();
    assert_eq!(none.kind(), io::ErrorKind::WouldBlock);
}

#[test]
fn a_daemon_with_a_full_queue_of_connections_times_out_and_the_error_says_so() {
    let (daemon, listener) = listen();
    socket::listen(&listener, Backlog::new(0).unwrap()).unwrap();
    let _waits = UnixStream::connect_addr(&listener.local_addr().unwrap()).unwrap();
    let deadline = Deadline::after(Duration::from_millis(50));
    let error = daemon.delete_path("sda", deadline).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert_eq!(error.last_seen(), Some("its queue of connections is full"));
}

#[test]
fn a_daemon_that_says_nothing_or_half_of_it_times_out() {
    for half in [
        &b""[..],
        &[4, 0, 0],
        &[&4_u64.to_ne_bytes()[..], b"o"].concat(),
    ] {
        let (daemon, listener) = listen();
        let half = half.to_vec();
        let silent = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            heard(&mut stream);
            stream.write_all(&half).unwrap();
            // This read ends when the client has given up.
            let _end = stream.read(&mut [0]);
        });
        // The deadline is long enough for the command to arrive on a busy machine.
        let deadline = Deadline::after(Duration::from_secs(1));
        let error = daemon.delete_path("sda", deadline).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert_eq!(error.stage(), Some(Stage::Forget));
        assert_eq!(error.last_seen(), Some("told, and no whole reply"));
        silent.join().unwrap();
    }
}

#[test]
fn a_reply_without_end_is_refused_and_one_cut_short_is_a_daemon_that_went_away() {
    let (daemon, _told) = answering(vec![u64::MAX.to_ne_bytes().to_vec()]);
    let error = daemon.add_path("sda", soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Protocol);
    let (daemon, _told) = answering(vec![9_u64.to_ne_bytes().to_vec()]);
    let error = daemon.add_path("sda", soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable);
}

#[test]
fn a_daemon_that_does_not_listen_is_unreachable_and_a_missing_one_is_not_found() {
    let (daemon, listener) = listen();
    drop(listener);
    let error = daemon.add_path("sda", soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    let nowhere = Roots::below("/no-such-machine");
    assert_eq!(Daemon::find(&nowhere).unwrap(), None);
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(64))]
    #[test]
    fn no_reply_panics(bytes: Vec<u8>, text: String) {
        let replies = [packet(&text), packet(&text), packet(&text)];
        let (daemon, told) = answering([vec![bytes], replies.to_vec()].concat());
        let _ = daemon.add_path("sda", soon());
        let _ = daemon.knows_path("sda", soon());
        let _ = daemon.resize_map("dm-0", soon());
        let _ = daemon.wwids(soon());
        told.join().unwrap();
    }
}
