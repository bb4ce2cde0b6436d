//! What `lunbd apply --watch` prints about its file, on a machine without storage and without
//! root.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a test panics to fail, and runs the command"
)]

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Duration;

use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(60);

/// A command that runs until it is dropped, and the lines that it prints.
struct Watch {
    child: Child,
    lines: Receiver<String>,
    directory: tempfile::TempDir,
}

impl Watch {
    fn of(text: &str, options: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("volumes.toml");
        fs::write(&file, text).unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_lunbd"))
            .args(["apply", "--watch", "--journal"])
            .arg(directory.path().join("journal"))
            .arg(&file)
            .args(options)
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let (sender, lines) = mpsc::channel();
        let out = BufReader::new(child.stdout.take().unwrap());
        thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        Self {
            child,
            lines,
            directory,
        }
    }

    fn file(&self) -> PathBuf {
        self.directory.path().join("volumes.toml")
    }

    fn next(&self) -> Value {
        let line = self.lines.recv_timeout(LIMIT).unwrap();
        println!("{line}");
        serde_json::from_str(&line).unwrap()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_change_of_the_file_that_is_refused_or_taken_in_is_json_for_a_program() {
    let watch = Watch::of("volume = []\n", &["--json"]);
    assert!(watch.next()["steps"].is_array());
    fs::write(watch.file(), "[[volume]]\nid = 7\n").unwrap();
    let refused = watch.next();
    assert_eq!(refused["event"], "file_refused");
    assert_eq!(refused["error"]["kind"], "invalid_input");
    let time = refused["time"].as_str().unwrap();
    assert!(humantime::parse_rfc3339(time).is_ok(), "{time}");
    let absent = "[[volume]]\nid = \"a\"\nsource = \"scsi:4294967295:0:0:1\"\n";
    fs::write(watch.file(), absent).unwrap();
    // The reconciler's failure may come before the follower's line.
    let mut told = [watch.next(), watch.next()];
    told.sort_by_key(|line| line["event"].as_str().map(str::to_owned));
    assert_eq!(told[0]["event"], "failed");
    assert_eq!(told[0]["sequence"], 1);
    assert_eq!(told[1]["event"], "file_taken_in");
}

#[test]
fn a_command_that_cannot_print_an_event_fails() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("volumes.toml");
    fs::write(
        &file,
        "[[volume]]\nid = \"a\"\nsource = \"scsi:4294967295:0:0:1\"\n",
    )
    .unwrap();
    let full = fs::OpenOptions::new()
        .write(true)
        .open("/dev/full")
        .unwrap();
    let status = Command::new(env!("CARGO_BIN_EXE_lunbd"))
        .args(["apply", "--watch", "--journal"])
        .arg(directory.path().join("journal"))
        .arg(&file)
        .stdout(full)
        .status()
        .unwrap();
    assert_eq!(status.code(), Some(1));
}
