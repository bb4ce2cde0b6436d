//! Targets that lie about lengths, flood, loop, hang, reflect and break the protocol. Each must
//! cause a clear error within the deadline.
#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics to fail, and a target may be slow"
)]

mod iscsi_target;

use std::io::{self, Write as _};
use std::time::{Duration, Instant};

use iscsi_target::*;
use lunbd::error::Stage;
use lunbd::iscsi::{
    Credentials, DiscoveredTarget, DiscoveryOptions, Secret, SessionName, SessionOptions, connect,
    discover,
};
use lunbd::{Deadline, Error, ErrorKind};

type Result<T> = lunbd::Result<T>;

/// The time for the caller's own work on a busy machine.
const TOLERANCE: Duration = Duration::from_secs(10);

fn options() -> DiscoveryOptions {
    DiscoveryOptions::new("iqn.2026-01.example:me".parse().unwrap())
}

fn mutual() -> Credentials {
    let secret = |text| Secret::new(text).unwrap();
    let one_way = Credentials::new("me", secret("what-i-know")).unwrap();
    one_way.mutual(None, secret("what-it-knows")).unwrap()
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(25))
}

fn ask_with(target: &Target, options: &DiscoveryOptions) -> Result<Vec<DiscoveredTarget>> {
    discover(target.portal(), options, soon()).map(|found| found.targets)
}

/// The login of a session that will carry I/O.
fn log_in_to(target: &Target, credentials: Option<&Credentials>) -> Result<()> {
    let name = SessionName {
        initiator: "iqn.2026-01.example:me".parse().unwrap(),
        target: "iqn.2026-01.example:it".parse().unwrap(),
        portal: target.portal().clone(),
    };
    let options = SessionOptions::new(name.initiator.clone());
    let options = match credentials {
        Some(credentials) => options.credentials(credentials.clone()),
        None => options,
    };
    connect(&name, &options, soon()).map(drop)
}

/// The error of a discovery from such a target. If the error is about the login, a session's
/// login has the same error.
fn refused_with(
    credentials: Option<&Credentials>,
    script: impl FnOnce(&mut Talk) -> io::Result<()> + Clone + Send + 'static,
) -> Error {
    let target = Target::one(script.clone());
    let options = match credentials {
        Some(credentials) => options().credentials(credentials.clone()),
        None => options(),
    };
    let error = ask_with(&target, &options).unwrap_err();
    target.finish();
    assert!(!error.to_string().contains(char::is_control), "{error}");
    if error.stage() == Some(Stage::Login) {
        let target = Target::one(script);
        let other = log_in_to(&target, credentials).unwrap_err();
        target.finish();
        assert_eq!(other.kind(), error.kind(), "{other}");
        assert_eq!(but_for_the_isid(&other), but_for_the_isid(&error));
    }
    error
}

/// Removes the ISID from an error, because each connection has its own.
fn but_for_the_isid(error: &Error) -> String {
    let text = error.to_string();
    let is_one = |word: &&str| word.len() == 12 && word.chars().all(|at| at.is_ascii_hexdigit());
    let words = text.split([' ', ',']).filter(|word| !is_one(word));
    words.collect::<Vec<_>>().join(" ")
}

/// The error from a target that plays this script and then waits for the client to close.
fn refused(script: impl FnOnce(&mut Talk) -> io::Result<()> + Clone + Send + 'static) -> Error {
    refused_with(None, |talk| {
        script(talk)?;
        talk.expect_close()
    })
}

#[track_caller]
fn assert_broken(error: &Error, stage: Stage, field: &str) {
    assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
    assert_eq!(error.stage(), Some(stage), "{error}");
    assert!(error.to_string().contains(field), "{error}");
}

#[test]
fn a_length_beyond_what_was_declared_is_refused_before_a_byte_of_it_is_read() {
    let lie = |talk: &mut Talk, opcode, length: u32| {
        let mut header = talk.answer(opcode, 0);
        header[4..8].copy_from_slice(&length.to_be_bytes());
        // A client that believed it would now wait for the rest.
        talk.stream.write_all(&header)
    };
    for length in [8193, 0x00ff_ffff, 0xffff_ffff] {
        let error = refused(move |talk| {
            talk.take(0x43)?;
            lie(talk, 0x23, length)
        });
        assert_broken(&error, Stage::Login, "DataSegmentLength");
    }
    let error = refused(move |talk| {
        talk.until_question()?;
        lie(talk, 0x24, 32_769)
    });
    assert_broken(&error, Stage::Discover, "DataSegmentLength is 32769");
}

#[test]
fn floods_end_at_their_limits() {
    let error = refused(|talk| {
        talk.take(0x43)?;
        let keys: Vec<_> = (0..65).map(|at| format!("X-{at}=1\0")).collect();
        talk.login(TO_OPERATIONAL, &keys.concat())
    });
    assert_broken(&error, Stage::Login, "the number of keys");
    // The text never ends, with and without a delimiter.
    for (text, field) in [
        ("x".repeat(4000), "the length of the text"),
        (String::new(), "the number of login exchanges"),
    ] {
        let error = refused_with(None, move |talk| {
            while talk.take(0x43).is_ok() {
                talk.login(CONTINUE, &text)?;
            }
            Ok(())
        });
        assert_broken(&error, Stage::Login, field);
    }
    for (part, field) in [
        (vec![b'x'; 32_768], "the length of the text"),
        (vec![], "the number of text responses"),
    ] {
        let error = refused_with(None, move |talk| {
            talk.until_question()?;
            talk.text(CONTINUE, 7, &part)?;
            while talk.take(0x44).is_ok() {
                talk.text(CONTINUE, 7, &part)?;
            }
            Ok(())
        });
        assert_broken(&error, Stage::Discover, field);
    }
    let error = refused_with(None, |talk| {
        talk.until_question()?;
        let mut ping = [0; 48];
        (ping[0], ping[1]) = (0x20, 0x80);
        while talk.send(ping, b"").is_ok() && talk.take(0x40).is_ok() {}
        Ok(())
    });
    assert_broken(&error, Stage::Discover, "the number of NOP-Ins");
}

#[test]
fn the_client_leaves_a_target_that_makes_no_progress() {
    for (first, flags) in [(false, STAY_IN_SECURITY), (true, STAY_IN_OPERATIONAL)] {
        let error = refused_with(None, move |talk| {
            if first {
                talk.until_operational()?;
                talk.login(flags, "")?;
            }
            while talk.take(0x43).is_ok() {
                talk.login(flags, "")?;
            }
            Ok(())
        });
        assert_broken(&error, Stage::Login, "the number of login exchanges");
    }
}

#[test]
fn each_breach_of_a_logins_rules_is_an_error_that_names_the_field() {
    for (flags, text, field) in [
        (
            TO_OPERATIONAL,
            "AuthMethod=None\0AuthMethod=None\0",
            "the key AuthMethod is given twice",
        ),
        (
            TO_OPERATIONAL,
            "X-a=1\0X-a=2\0",
            "the key X-a is given twice",
        ),
        (
            TO_OPERATIONAL,
            "AuthMethod=CHAP\0",
            "AuthMethod is \"CHAP\"",
        ),
        (
            TO_OPERATIONAL,
            "AuthMethod=KRB5\0",
            "AuthMethod is \"KRB5\"",
        ),
        (TO_OPERATIONAL, "CHAP_A=5\0", "CHAP_A"),
        (
            TO_OPERATIONAL,
            "MaxRecvDataSegmentLength=512\0",
            "MaxRecvDataSegmentLength",
        ),
        (
            TO_OPERATIONAL,
            "TargetPortalGroupTag=65536\0",
            "TargetPortalGroupTag",
        ),
        (TO_OPERATIONAL, "AuthMethod", "zero byte"),
        (TO_OPERATIONAL, "AuthMethod\0", "key=value"),
        (TO_OPERATIONAL, "A=\u{1b}[2J\0", r"\u{1b}"),
        (STAY_IN_OPERATIONAL, "", "CSG is Operational"),
        (TO_FULL, "", "CSG is Operational"),
        (0x83, "", "T and NSG"),
        (0x08, "", "CSG is 2"),
        (0xc1, "", "C of a login response"),
    ] {
        let error = refused(move |talk| {
            talk.take(0x43)?;
            talk.login(flags, text)
        });
        assert_broken(&error, Stage::Login, field);
    }
    for (text, field) in [
        ("HeaderDigest=CRC32C\0", "HeaderDigest is \"CRC32C\""),
        ("DataDigest=Reject\0", "DataDigest is \"Reject\""),
        ("MaxRecvDataSegmentLength=1\0", "MaxRecvDataSegmentLength"),
        ("ErrorRecoveryLevel=-1\0", "ErrorRecoveryLevel"),
        ("AuthMethod=None\0", "the key AuthMethod is given twice"),
    ] {
        let error = refused(move |talk| {
            talk.until_operational()?;
            talk.login(TO_FULL, text)
        });
        assert_broken(&error, Stage::Login, field);
    }
}

#[test]
fn an_answer_to_another_question_is_refused() {
    for (at, field) in [
        (3, "Version-active"),
        (8, "ISID"),
        (16, "Initiator Task Tag"),
        (0, "opcode"),
    ] {
        let error = refused(move |talk| {
            talk.take(0x43)?;
            let mut header = talk.answer(0x23, TO_OPERATIONAL);
            header[at] ^= 0x01;
            talk.send(header, b"AuthMethod=None\0")
        });
        assert_broken(&error, Stage::Login, field);
    }
    let error = refused(|talk| {
        talk.take(0x43)?;
        talk.send(talk.answer(0x26, FINAL), b"")
    });
    assert_broken(&error, Stage::Login, "a logout response");
    for (at, bit, field) in [
        (16, 0x01, "Initiator Task Tag"),
        (1, FINAL, "Target Transfer Tag"),
        (0, 0x01, "opcode"),
    ] {
        let error = refused(move |talk| {
            talk.until_question()?;
            let mut header = talk.answer(0x24, FINAL);
            header[20..24].copy_from_slice(&[0xff; 4]);
            header[at] ^= bit;
            talk.send(header, b"")
        });
        assert_broken(&error, Stage::Discover, field);
    }
}

#[test]
fn an_answer_that_is_no_iscsi_is_refused_at_login_by_its_opcode() {
    for garbage in [
        &b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/html\r\n\r\n"[..],
        &[0x55; 48],
    ] {
        let error = refused(move |talk| {
            talk.take(0x43)?;
            talk.stream.write_all(garbage)
        });
        assert_broken(&error, Stage::Login, "opcode");
    }
}

#[test]
fn redirects_that_lead_nowhere_are_refused() {
    let redirect = |to: String| -> Script {
        Box::new(move |talk| {
            talk.take(0x43)?;
            talk.status(1, 2, &format!("TargetAddress={to}\0"))?;
            talk.expect_close()
        })
    };
    let [itself, there, back] = [(); 3].map(|()| Place::new());
    let to = itself.portal().to_string();
    let itself = itself.play(vec![redirect(to)]);
    let error = ask_with(&itself, &options()).unwrap_err();
    assert_broken(&error, Stage::Login, "in a loop");
    itself.finish();

    let (near, far) = (there.portal(), back.portal());
    let there = there.play(vec![redirect(format!("{far},1"))]);
    let back = back.play(vec![redirect(near.to_string())]);
    let error = ask_with(&there, &options()).unwrap_err();
    assert_broken(&error, Stage::Login, &format!("{near} to {far} to {near}"));
    there.finish();
    back.finish();

    let mut chain: Vec<Place> = (0..7).map(|_| Place::new()).collect();
    let last = chain.pop().unwrap();
    let mut next = last.portal();
    let mut chain: Vec<Target> = chain
        .into_iter()
        .rev()
        .map(|place| {
            let to = std::mem::replace(&mut next, place.portal()).to_string();
            place.play(vec![redirect(to)])
        })
        .collect();
    chain.reverse();
    let error = ask_with(&chain[0], &options()).unwrap_err();
    assert_broken(&error, Stage::Login, "too often");
    chain.into_iter().for_each(Target::finish);

    for text in ["", "TargetAddress=\0", "TargetAddress=:3260\0", "X-a=1\0"] {
        let error = refused(move |talk| {
            talk.take(0x43)?;
            talk.status(1, 1, text)
        });
        assert_broken(&error, Stage::Login, "TargetAddress");
    }
}

#[test]
fn the_status_of_a_login_decides_the_kind() {
    for (class, detail, kind) in [
        (2, 1, ErrorKind::NotPermitted),
        (2, 2, ErrorKind::NotPermitted),
        (2, 3, ErrorKind::NotFound),
        (2, 9, ErrorKind::NotSupported),
        (2, 11, ErrorKind::Refused),
        (3, 1, ErrorKind::NotReady),
        (9, 0, ErrorKind::Protocol),
    ] {
        let error = refused(move |talk| {
            talk.take(0x43)?;
            talk.status(class, detail, "")
        });
        assert_eq!(error.kind(), kind, "{error}");
        assert_eq!(error.stage(), Some(Stage::Login), "{error}");
    }
}

#[test]
fn a_target_that_closes_in_the_middle_is_unreachable() {
    let mut header = [0; 48];
    (header[0], header[36]) = (0x32, 1);
    let error = refused(move |talk| {
        talk.until_question()?;
        talk.send(header, b"")
    });
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    header[0] = 0x3f;
    let error = refused(move |talk| {
        talk.until_question()?;
        talk.send(header, b"")
    });
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    // Cut the answer at any byte.
    for at in [0, 1, 47, 48, 50, 63] {
        let error = refused_with(None, move |talk| {
            talk.take(0x43)?;
            let whole = pdu(talk.answer(0x23, TO_OPERATIONAL), b"AuthMethod=None\0");
            talk.stream.write_all(&whole[..at])
        });
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
        assert_eq!(error.stage(), Some(Stage::Login), "{error}");
    }
}

#[test]
fn a_target_that_dribbles_or_hangs_does_not_outlast_the_deadline() {
    let dribble = |talk: &mut Talk, whole: Vec<u8>| {
        for byte in whole {
            if talk.stream.write_all(&[byte]).is_err() {
                break;
            }
            // The whole answer takes over half a minute.
            std::thread::sleep(Duration::from_millis(500));
        }
        talk.hang();
        Ok(())
    };
    let in_login: Script = Box::new(move |talk| {
        talk.take(0x43)?;
        dribble(
            talk,
            pdu(talk.answer(0x23, TO_OPERATIONAL), b"AuthMethod=None\0"),
        )
    });
    let in_list: Script = Box::new(move |talk| {
        talk.until_question()?;
        dribble(talk, pdu(talk.answer(0x24, FINAL), &[b'x'; 100]))
    });
    let silent: Script = Box::new(|talk| {
        talk.hang();
        Ok(())
    });
    for (script, stage) in [
        (in_login, Stage::Login),
        (in_list, Stage::Discover),
        (silent, Stage::Login),
    ] {
        let target = Place::new().play(vec![script]);
        let began = Instant::now();
        let limit = Duration::from_secs(6);
        let error = discover(target.portal(), &options(), Deadline::after(limit)).unwrap_err();
        let took = began.elapsed();
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
        assert_eq!(error.stage(), Some(stage), "{error}");
        assert!(took >= limit && took < limit + TOLERANCE, "{took:?}");
        assert!(error.last_seen().unwrap().contains(" bytes"), "{error}");
        target.finish();
    }
}

#[test]
fn a_login_that_requires_proof_fails_without_it() {
    // The target offers no CHAP at all.
    for text in ["AuthMethod=None\0", "AuthMethod=Reject\0"] {
        let error = refused_with(Some(&mutual()), move |talk| {
            talk.take(0x43)?;
            let offered = talk.value("AuthMethod");
            talk.must(offered.as_deref() == Some("CHAP"), "CHAP alone")?;
            talk.login(STAY_IN_SECURITY, text)?;
            talk.expect_close()
        });
        assert!(error.to_string().contains("auth") || error.to_string().contains("AuthMethod"));
    }
    // The proof is absent, wrong, or our own; the client then sends nothing more.
    for (keys, what) in [
        ("", "did not prove"),
        ("CHAP_N=it\0CHAP_R=0x00\0", "another secret"),
        ("CHAP_N=it\0CHAP_R={R}\0", "our own response"),
    ] {
        let error = refused_with(Some(&mutual()), move |talk| {
            talk.until_proof("0x0102030405060708")?;
            talk.take(0x43)?;
            let ours = talk.value("CHAP_R").unwrap();
            talk.must(talk.value("CHAP_C").is_some(), "a challenge")?;
            talk.login(TO_OPERATIONAL, &keys.replace("{R}", &ours))?;
            talk.expect_close()
        });
        assert_eq!(error.kind(), ErrorKind::NotPermitted, "{error}");
        assert!(error.to_string().contains(what), "{error}");
    }
    // The target continues before it has asked for our proof.
    let error = refused_with(Some(&mutual()), |talk| {
        talk.take(0x43)?;
        talk.login(TO_OPERATIONAL, "AuthMethod=CHAP\0")?;
        talk.expect_close()
    });
    assert_broken(&error, Stage::Login, "T and NSG");
}

#[test]
fn our_own_challenge_sent_back_through_another_portal_is_not_answered() {
    let (asks, learned) = std::sync::mpsc::channel::<String>();
    let second = Target::one(move |talk| {
        let ours = learned.recv().map_err(io::Error::other)?;
        talk.until_proof(&ours)?;
        talk.expect_close()
    });
    let to = second.portal().to_string();
    let first = Target::one(move |talk| {
        talk.until_proof("0x0102030405060708")?;
        talk.take(0x43)?;
        asks.send(talk.value("CHAP_C").unwrap())
            .map_err(io::Error::other)?;
        talk.status(1, 1, &format!("TargetAddress={to}\0"))?;
        talk.expect_close()
    });
    let error = ask_with(&first, &options().credentials(mutual())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotPermitted, "{error}");
    assert!(error.to_string().contains("our own challenge"), "{error}");
    first.finish();
    second.finish();
}

#[test]
fn an_invalid_challenge_is_refused_and_the_error_names_its_key() {
    let long = format!("0x{}", "00".repeat(1025));
    for challenge in ["0x", "0x0", "zz", "0b!", &long] {
        let challenge = challenge.to_owned();
        let error = refused_with(Some(&mutual()), move |talk| {
            talk.until_proof(&challenge)?;
            talk.expect_close()
        });
        assert_broken(&error, Stage::Login, "CHAP_C");
    }
}
