//! What `lunbd apply --watch` prints about its file, on a machine without storage and without
//! root.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a test panics to fail, and runs the command"
)]

use std::fs;
use std::io::{BufRead, BufReader, ErrorKind};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use lunbd::engine::journal::Record;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(60);

/// A command that runs until it is dropped, and the lines that it prints.
struct Watch {
    child: Child,
    lines: Receiver<String>,
    directory: tempfile::TempDir,
}

impl Watch {
    fn of(text: &str, options: &[&str]) -> Self {
        Self::in_directory(tempfile::tempdir().unwrap(), text, options)
    }

    fn in_directory(directory: tempfile::TempDir, text: &str, options: &[&str]) -> Self {
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

    /// The next line about the file. The reconciler's own events may come between.
    fn next_of_the_file(&self) -> Value {
        loop {
            let line = self.next();
            if line["type"] == "file_event" {
                return line;
            }
        }
    }

    /// Puts a file of this text at the place of the file at once.
    fn replace(&self, text: &str) {
        let other = self.directory.path().join("new");
        fs::write(&other, text).unwrap();
        fs::rename(other, self.file()).unwrap();
    }

    fn record(&self, volume: &str) -> PathBuf {
        self.directory.path().join(format!("journal/{volume}.json"))
    }

    /// Puts a directory at the place of the record, so that the record cannot be written any
    /// more. The command may write the record in between.
    fn spoil_record(&self, volume: &str) {
        let record = self.record(volume);
        let start = Instant::now();
        loop {
            fs::remove_file(&record).unwrap();
            match fs::create_dir(&record) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                    assert!(start.elapsed() < LIMIT, "{error}");
                }
                created => {
                    created.unwrap();
                    return;
                }
            }
        }
    }
}

/// A directory with a journal that has these volumes.
fn journal_of(volumes: &[&str]) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let journal = directory.path().join("journal");
    fs::create_dir(&journal).unwrap();
    fs::write(journal.join("journal.lock"), "").unwrap();
    for volume in volumes {
        let record = json!({
            "volume": volume,
            "spec": {
                "sources": [source(volume)],
                "expect": null,
                "min_paths": 1,
                "multipath": "prefer",
                "nbd": null,
            },
            "intent": null,
            "outcome": null,
        });
        let record = Record::seal(&serde_json::to_vec(&record).unwrap());
        fs::write(journal.join(format!("{volume}.json")), record).unwrap();
    }
    directory
}

/// A source on a host that no machine has.
fn source(volume: &str) -> String {
    let lun = volume.as_bytes()[0];
    format!("scsi:4294967295:0:0:{lun}")
}

fn file_of(volumes: &[&str]) -> String {
    let volume = |id: &&str| format!("[[volume]]\nid = \"{id}\"\nsource = \"{}\"\n", source(id));
    volumes.iter().map(volume).collect()
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

#[test]
fn a_fifo_at_the_place_of_the_file_is_refused_and_does_not_end_the_following() {
    let watch = Watch::of("volume = []\n", &["--json"]);
    assert!(watch.next()["steps"].is_array());
    let fifo = watch.directory.path().join("fifo");
    mkfifo(&fifo, Mode::S_IRWXU).unwrap();
    fs::rename(&fifo, watch.file()).unwrap();
    let refused = watch.next_of_the_file();
    assert_eq!(refused["event"], "file_refused");
    assert_eq!(refused["error"]["kind"], "invalid_input");
    watch.replace(&file_of(&["a"]));
    assert_eq!(watch.next_of_the_file()["event"], "file_taken_in");
}

#[test]
fn a_file_that_is_too_long_is_refused_before_it_is_read_whole() {
    let watch = Watch::of("volume = []\n", &["--json"]);
    assert!(watch.next()["steps"].is_array());
    let large = watch.directory.path().join("large");
    let file = fs::File::create(&large).unwrap();
    file.set_len(1 << 30).unwrap();
    drop(file);
    fs::rename(&large, watch.file()).unwrap();
    let refused = watch.next_of_the_file();
    assert_eq!(refused["event"], "file_refused");
    let message = refused["error"]["message"].as_str().unwrap();
    assert!(message.contains("16 MiB"), "{message}");
}

#[test]
fn half_a_file_is_refused_by_its_last_line_or_by_its_missing_end() {
    let directory = journal_of(&["a", "b"]);
    let whole = format!("has_end = true\n{}[end]\n", file_of(&["a", "b"]));
    let watch = Watch::in_directory(directory, &whole, &["--json"]);
    assert!(watch.next()["steps"].is_array());
    let half = format!("has_end = true\n{}", file_of(&["a"]));
    let open = file_of(&["a", "b"]);
    for (text, why) in [(open.trim_end(), "no newline"), (&half, "announces an end")] {
        watch.replace(text);
        let refused = watch.next_of_the_file();
        assert_eq!(refused["event"], "file_refused", "{text}");
        let message = refused["error"]["message"].as_str().unwrap();
        assert!(message.contains(why), "{message}");
    }
    assert!(watch.record("a").exists() && watch.record("b").exists());
}

#[test]
fn a_file_that_would_detach_too_many_volumes_at_the_start_detaches_none_and_its_others_are_kept() {
    let directory = journal_of(&["a", "b", "c", "d", "e"]);
    let watch = Watch::in_directory(directory, &file_of(&["a", "b", "f"]), &["--json"]);
    let plan = watch.next();
    let kinds = plan["steps"].as_array().unwrap().iter();
    assert!(kinds.clone().all(|step| step["kind"] != "detach"), "{plan}");
    assert!(kinds.clone().any(|step| step["volume"] == "f"), "{plan}");
    let refused = watch.next_of_the_file();
    assert_eq!(refused["event"], "file_refused");
    let message = refused["error"]["message"].as_str().unwrap();
    assert!(message.contains("3 of 5 volumes: c, d, e"), "{message}");
    // Now the change would detach one, and the others are attached as they were.
    watch.replace(&file_of(&["a", "b", "c", "d"]));
    assert_eq!(watch.next_of_the_file()["event"], "file_taken_in");
    while watch.next()["event"] != "detached" {}
    assert!(watch.record("c").exists() && watch.record("d").exists());
}

#[test]
fn a_change_counts_the_volumes_that_it_detaches_and_not_those_of_earlier_changes() {
    let directory = journal_of(&["a", "b", "c", "d", "e"]);
    let all = file_of(&["a", "b", "c", "d", "e"]);
    let watch = Watch::in_directory(directory, &all, &["--json"]);
    assert!(watch.next()["steps"].is_array());
    // These detaches fail.
    for volume in ["d", "e"] {
        watch.spoil_record(volume);
    }
    watch.replace(&file_of(&["a", "b", "c"]));
    assert_eq!(watch.next_of_the_file()["event"], "file_taken_in");
    let mut failed = Vec::new();
    while failed.len() < 2 {
        let line = watch.next();
        if line["event"] == "failed" && line["step"] == "detach" {
            failed.push(line["volume"].clone());
        }
    }
    watch.replace(&file_of(&["a", "b"]));
    let event = watch.next_of_the_file();
    assert_eq!(event["event"], "file_taken_in", "{event}");
    watch.replace("volume = []\n");
    assert_eq!(watch.next_of_the_file()["event"], "file_taken_in");
}
