//! The `lunbd` command with a limit of few threads, as by a container's `pids.max`.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Output, Stdio};
use std::time::Duration;

use vm_tests::guest::agent::unit;
use vm_tests::guest::directory::Directory;
use vm_tests::guest::rotation::Part;
use vm_tests::guest::thread_limit::ThreadLimit;
use vm_tests::guest::{self, ScsiDebug};

/// The limit of one call, also on a machine that is several times slower.
const LIMIT: Duration = Duration::from_secs(120);
/// The limit of a test, which starts the command dozens of times.
const IN_ALL: Duration = Duration::from_secs(900);
/// With this many threads an attach has all that it needs.
const ENOUGH: u32 = 12;

/// The least and the greatest limit, and a fifth of those between them.
fn limits_of_this_run() -> impl Iterator<Item = u32> {
    let part = Part::of_this_run();
    let is_an_end = |most| most == 1 || most == ENOUGH;
    (1..=ENOUGH).filter(move |most| is_an_end(*most) || part.has(&format!("pids.max:{most}")))
}

fn said(output: &Output) -> String {
    let text = [output.stdout.clone(), output.stderr.clone()].concat();
    String::from_utf8(text).unwrap()
}

#[test]
fn a_command_without_threads_fails_with_a_message_and_leaves_nothing_half_done() {
    guest::time_limit(IN_ALL);
    let limit = ThreadLimit::none();
    let target = ScsiDebug::with_luns(4);
    let directory = Directory::new("threads");
    let path = |name: &str| directory.join(name).display().to_string();
    let (journal, file, empty) = (path("journal"), path("file"), path("empty"));
    let lun = |number| unit(&target, number).to_string();
    let (first, second) = (lun(1), lun(2));
    fs::write(
        &file,
        format!("[[volume]]\nid = \"a\"\nsource = \"{first}\"\n"),
    )
    .unwrap();
    fs::write(&empty, "volume = []\n").unwrap();
    let journal = ["--journal", &journal];
    let mut succeeded = Vec::new();
    let limits: Vec<u32> = limits_of_this_run().collect();
    for &most in &limits {
        limit.set(most);
        for command in [
            &["apply", &file, "--timeout", "60s"][..],
            &["status"],
            &["recover"],
            &["reap", "--dry-run"],
            &["apply", &empty, "--timeout", "60s"],
        ] {
            let output = limit.lunbd(&[command, &journal].concat()).output().unwrap();
            ends_in_words(&output, most, command);
            succeeded.push((command[0].to_owned(), most, output.status.success()));
        }
        // Some of the calls without a journal need no other thread.
        for command in [
            &["attach", &second][..],
            &["detach", &second],
            &["resize", &second],
            &["list"],
            &["doctor"],
            &["heal"],
            &[
                "discover",
                "127.0.0.1:1",
                "--initiator",
                "iqn.2026-01.org.lunbd:a",
            ],
        ] {
            let output = limit.lunbd(command).output().unwrap();
            ends_in_words(&output, most, command);
            if command[0] == "attach" {
                leaves_no_disk(&output, most, &target);
            }
            succeeded.push((command[0].to_owned(), most, output.status.success()));
        }
        limit.lift();
        let undo = limit
            .lunbd(&[&["apply", &empty][..], &journal].concat())
            .output();
        assert!(undo.unwrap().status.success());
        let undo = limit.lunbd(&["detach", &second]).output().unwrap();
        assert!(undo.status.success(), "{undo:?}");
        assert_eq!(target.devices(), [] as [&str; 0]);
    }
    for command in ["apply", "status", "recover", "attach", "detach"] {
        let mut all = succeeded.iter().filter(|(name, ..)| name == command);
        assert!(
            all.clone()
                .any(|(_, most, succeeds)| *most == 1 && !succeeds),
            "{command} has no limit: {succeeded:?}"
        );
        assert!(
            all.all(|(_, most, succeeds)| *most < ENOUGH || *succeeds),
            "{command} needs more than {ENOUGH}: {succeeded:?}"
        );
    }
    guest::tell_met(&format!(
        "pids.max of this run: {limits:?} of 1 to {ENOUGH}"
    ));
}

#[track_caller]
fn ends_in_words(output: &Output, most: u32, command: &[&str]) {
    let said = said(output);
    let code = output.status.code();
    assert!(
        code.is_some_and(|code| code != 101) && !said.contains("panicked"),
        "pids.max {most}, {command:?}: {code:?}: {said}"
    );
    let is_silent = output.stderr.is_empty() && output.stdout.is_empty();
    assert!(
        code == Some(0) || !is_silent,
        "{most} {command:?}: {code:?}"
    );
}

/// Panics if an attach of LUN 2 failed and left its disk without saying so.
#[track_caller]
fn leaves_no_disk(output: &Output, most: u32, target: &ScsiDebug) {
    let said = said(output);
    assert!(
        output.status.success()
            || target.disk(2).is_none()
            || said.contains("the rollback could not remove the device"),
        "pids.max {most}: {said}"
    );
}

/// A process that is killed on drop, not stopped.
struct Agent(Child);

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_reconciler_that_lacks_threads_continues_and_attaches_when_it_can_start_them() {
    guest::time_limit(IN_ALL);
    let limit = ThreadLimit::none();
    let target = ScsiDebug::with_luns(4);
    let directory = Directory::new("threads");
    let path = |name: &str| directory.join(name).display().to_string();
    let (journal, file, empty) = (path("journal"), path("file"), path("empty"));
    let source = unit(&target, 1).to_string();
    let volume = format!("[[volume]]\nid = \"a\"\nsource = \"{source}\"\n");
    fs::write(&file, volume).unwrap();
    fs::write(&empty, "volume = []\n").unwrap();
    let mut waited = 0;
    for most in 1..=ENOUGH {
        println!("pids.max {most}");
        limit.set(most);
        let log = directory.join(format!("log-{most}"));
        let log_file = || {
            Stdio::from(
                File::options()
                    .append(true)
                    .create(true)
                    .open(&log)
                    .unwrap(),
            )
        };
        let mut command = limit.lunbd(&["apply", &file, "--watch", "--journal", &journal]);
        let command = command
            .stdin(Stdio::null())
            .stdout(log_file())
            .stderr(log_file());
        let mut agent = Agent(command.spawn().unwrap());
        let log = || fs::read_to_string(&log).unwrap();
        let ended = guest::wait_until("an end, an attach or a word", LIMIT, || {
            if let Some(status) = agent.0.try_wait().unwrap() {
                return Some(Some(status));
            }
            let lacks_one = [
                "cannot start a thread, and will try again",
                "a: attach failed",
            ]
            .map(|text| log().contains(text));
            let goes_on = lacks_one.contains(&true) || log().contains(": attached as");
            goes_on.then_some(None)
        });
        assert!(!log().contains("panicked"), "{}", log());
        if let Some(status) = ended {
            assert_eq!(status.code(), Some(1), "{}", log());
            continue;
        }
        waited += u32::from(log().contains("cannot start a thread, and will try again"));
        limit.lift();
        guest::wait_until("the attach", LIMIT, || {
            assert!(agent.0.try_wait().unwrap().is_none(), "{}", log());
            log().contains(": attached as").then_some(())
        });
        drop(agent);
        let undone = guest::lunbd(&["apply", &empty, "--journal", &journal]);
        assert!(undone.status.success(), "{undone:?}");
    }
    assert!(waited > 0, "no limit was met in the loop");
    assert!(Path::new(&journal).exists());
}
