//! What the command says about its input, on a machine without storage and without root.
#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics to fail, and runs the command"
)]

use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use serde_json::Value;

fn lunbd(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_lunbd"))
        .args(arguments)
        .output()
        .unwrap()
}

fn failure(output: &Output) -> Value {
    assert!(output.stdout.is_empty(), "{output:?}");
    serde_json::from_slice(&output.stderr).unwrap()
}

#[test]
fn malformed_input_is_usage_and_says_what_was_expected() {
    for (arguments, expected) in [
        (&["attach", "scsi:0:0:0:010"][..], "plain decimal"),
        (&["attach", "sda"], "scsi:HOST:CHANNEL:TARGET:LUN"),
        (&["attach", "scsi:0:0:0:1", "--expect", "60014"], "naa.HEX"),
        (
            &["attach", "scsi:0:0:0:1", "--timeout", "30"],
            "as in 500ms, 30s or 2m",
        ),
        (&["detach", "sda"], "the path of a disk's node"),
        (&["discover", "::1"], "an IPv6 address in brackets"),
        (
            &["discover", "nbd://h/disk"],
            "an NBD server without an export",
        ),
        (&["discover", "nbds+unix:///?socket=/s"], "over TCP"),
        (
            &["discover", "h", "--initiator", "me"],
            "iqn.YYYY-MM.DOMAIN",
        ),
        (&["attach", "scsi:0:0:0:1", "--digests"], "--log-in"),
        (&["attach", "nbd://h/disk", "--accept-content"], "--volume"),
        (&["heal", "--io-timeout", "5s"], "SOURCE"),
        (&["conquer"], "unrecognized subcommand"),
    ] {
        let output = lunbd(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.contains(expected), "{arguments:?}: {text}");
    }
}

#[test]
fn an_error_in_json_is_one_object_with_all_that_is_known() {
    let output = lunbd(&["attach", "scsi:4294967295:0:0:0", "--json"]);
    assert_eq!(output.status.code(), Some(3));
    let error = failure(&output);
    assert_eq!(error["kind"], "no_such_host");
    assert_eq!(error["stage"], "resolve");
    assert_eq!(error["retry"], "after_change");
    assert_eq!(error.get("last_seen"), Some(&Value::Null));
    assert!(
        error["message"]
            .as_str()
            .unwrap()
            .contains("no SCSI host 4294967295")
    );

    let output = lunbd(&["attach", "nonsense", "--json"]);
    assert_eq!(output.status.code(), Some(2));
    let error = failure(&output);
    assert_eq!(error["kind"], "invalid_input");
    assert_eq!(error["retry"], "never");
}

#[test]
fn a_path_that_is_no_disk_is_usage_and_one_that_leads_nowhere_is_not_found() {
    assert_eq!(lunbd(&["detach", "/dev/null"]).status.code(), Some(2));
    assert_eq!(lunbd(&["detach", "/dev/no-such"]).status.code(), Some(3));
}

#[test]
fn a_pipe_gets_no_progress_and_help_is_no_failure() {
    let output = lunbd(&["detach", "scsi:4294967295:0:0:0"]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(!text.contains("detaching"), "{text}");
    let help = lunbd(&["--help"]);
    assert!(help.status.success());
    let text = String::from_utf8(help.stdout).unwrap();
    for code in [
        "0 done",
        "1 other",
        "2 usage",
        "3 not found",
        "4 identity",
        "5 in",
        "6 timed",
        "7 not",
        "8 not",
    ] {
        assert!(text.replace('\n', " ").contains(code), "{code}: {text}");
    }
}

/// The commands that the help names.
fn commands() -> Vec<String> {
    let help = String::from_utf8(lunbd(&["--help"]).stdout).unwrap();
    let (_, commands) = help.split_once("\nCommands:\n").unwrap();
    let lines = commands.lines().take_while(|line| !line.is_empty());
    let indented = lines.filter_map(|line| line.strip_prefix("  "));
    let names = indented.filter(|line| !line.starts_with(' '));
    names
        .filter_map(|line| line.split_whitespace().next())
        .map(str::to_owned)
        .collect()
}

#[test]
fn each_command_says_of_itself_what_the_list_says_of_it() {
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let list = words(&String::from_utf8(lunbd(&["--help"]).stdout).unwrap());
    for command in commands().iter().filter(|name| *name != "help") {
        let help = String::from_utf8(lunbd(&[command, "--help"]).stdout).unwrap();
        let (about, _) = help.split_once("\n\n").unwrap();
        assert!(
            list.contains(&words(&format!("{command} {about}"))),
            "{help}"
        );
    }
}

#[test]
fn completions_and_manual_pages_name_every_command_and_its_options() {
    let commands = commands();
    assert!(commands.len() > 10, "{commands:?}");
    let all = String::from_utf8(lunbd(&["man"]).stdout).unwrap();
    for command in commands.iter().filter(|name| *name != "help") {
        // roff escapes the hyphen.
        let escaped = command.replace('-', "\\-");
        assert!(
            all.contains(&format!("lunbd\\-{escaped}(1)")),
            "{command}: {all}"
        );
        let page = lunbd(&["man", command]);
        assert!(page.status.success(), "{page:?}");
        let page = String::from_utf8(page.stdout).unwrap();
        assert!(page.contains(&format!("lunbd\\-{escaped}")), "{page}");
        assert!(page.contains("json"), "{command}: {page}");
    }
    let page = String::from_utf8(lunbd(&["man", "reap"]).stdout).unwrap();
    assert!(page.contains("dry\\-run"), "{page}");
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let script = String::from_utf8(lunbd(&["completions", shell]).stdout).unwrap();
        for word in commands
            .iter()
            .map(String::as_str)
            .chain(["abandon-unwritten"])
        {
            assert!(script.contains(word), "{word} for {shell}");
        }
    }
    assert_eq!(lunbd(&["man", "conquer"]).status.code(), Some(2));
    assert_eq!(lunbd(&["completions", "dos"]).status.code(), Some(2));
}

#[test]
fn a_plan_with_something_to_do_has_an_exit_code_of_its_own_where_that_is_asked_for() {
    let place = tempfile::tempdir().unwrap();
    let (journal, file) = (place.path().join("journal"), place.path().join("v.toml"));
    let plan = |text: &str, options: &[&str]| {
        std::fs::write(&file, text).unwrap();
        let [journal, file] = [&journal, &file].map(|path| path.to_str().unwrap());
        let arguments = ["apply", file, "--journal", journal, "--dry-run"];
        lunbd(&[&arguments[..], options].concat()).status.code()
    };
    let one = "[[volume]]\nid = \"pvc-1\"\nsource = \"scsi:4294967295:0:0:1\"\n";
    let large = format!("{one}min_size = \"16GiB\"\n");
    assert_eq!(plan(one, &[]), Some(0));
    assert_eq!(plan(&large, &["--exit-code"]), Some(2));
    assert_eq!(plan("volume = []\n", &["--exit-code"]), Some(0));
    // What cannot be compared has another exit code than a plan.
    assert_eq!(plan("", &["--exit-code"]), Some(1));
    assert_eq!(plan("", &[]), Some(2));
    // Another failure keeps its own code.
    let missing = place.path().join("none.toml");
    let missing = [
        "apply",
        missing.to_str().unwrap(),
        "--dry-run",
        "--exit-code",
    ];
    assert_eq!(lunbd(&missing).status.code(), Some(3));
}

#[test]
fn a_file_that_never_answers_is_given_up_at_the_timeout() {
    let place = tempfile::tempdir().unwrap();
    let (journal, file) = (place.path().join("journal"), place.path().join("v.toml"));
    mkfifo(&file, Mode::S_IRWXU).unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_lunbd"))
        .args(["apply", "--dry-run", "--timeout", "1s", "--journal"])
        .args([&journal, &file])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let begun = Instant::now();
    while child.try_wait().unwrap().is_none() && begun.elapsed() < Duration::from_secs(20) {
        thread::park_timeout(Duration::from_millis(20));
    }
    let ended = child.try_wait().unwrap();
    child.kill().unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(
        ended.and_then(|status| status.code()),
        Some(6),
        "{output:?}"
    );
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        said.contains("timed out") && said.contains("v.toml"),
        "{said}"
    );
}

#[test]
fn an_error_in_the_file_names_its_line_and_does_not_print_it() {
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("v.toml");
    let text = "[[volume]]\nid = \"a\"\nsource = \"scsi:2:0:0:1\"\n\
                log_in = { secret = \"hush\" }\n";
    std::fs::write(&file, text).unwrap();
    let output = lunbd(&["apply", "--dry-run", file.to_str().unwrap()]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("line 4") && said.contains("secret"), "{said}");
    assert!(!said.contains("hush"), "{said}");
}

#[test]
fn apply_shows_its_plan_and_reports_a_broken_file_by_line_and_key_without_a_change() {
    let place = tempfile::tempdir().unwrap();
    let journal = place.path().join("journal");
    let journal = journal.to_str().unwrap();
    let file = place.path().join("volumes.toml");
    let apply = |text: &str, options: &[&str]| {
        std::fs::write(&file, text).unwrap();
        let arguments = ["apply", file.to_str().unwrap(), "--journal", journal];
        lunbd(&[&arguments[..], options].concat())
    };
    let good = "[[volume]]\nid = \"pvc-1\"\nsource = \"scsi:4294967295:0:0:1\"\n";
    let other = |id| good.replace("pvc-1", id).replace("0:0:1", "0:0:2");
    let expect = "expect = \"naa.5000c500a1b2c3d4\"\n";
    for (text, expected) in [
        (
            "[[volume]]\nid = \"a\"\nsorce = 1\n",
            &["line 3", "sorce"][..],
        ),
        (
            "[[volume]]\nid = \"a\"\nsource = \"sda\"\n",
            &["line 3", "source: ", "\"sda\" is not a source"],
        ),
        ("[[volume]]\nid = 7\n", &["line 2", "id: "]),
        ("[[volume]\n", &["line 1", "unclosed"]),
        ("[[volume]]\nid = \"a\"\n", &["volume a", "no source"]),
        (
            &format!("{good}min_size = \"1 GB\"\n"),
            &["line 4", "min_size"],
        ),
        // Two volumes that claim one thing, and one volume with two sources.
        (
            &format!("{good}{}", good.replace("pvc-1", "b")),
            &["source scsi:4294967295:0:0:1", "volume pvc-1", "volume b"],
        ),
        (
            &format!("{good}{expect}{}{expect}", other("b")),
            &["unit naa.5000c500a1b2c3d4", "volume pvc-1", "volume b"],
        ),
        (
            "[[volume]]\nid = \"a\"\nsource = \"nbd://h/x\"\nnbd = { backend = \"k\" }\n\
             [[volume]]\nid = \"b\"\nsource = \"nbd://h/y\"\nnbd = { backend = \"k\" }\n",
            &["backend id k", "volume a", "volume b"],
        ),
        (
            &format!("{good}{}", other("pvc-1")),
            &[
                "volume pvc-1 is wanted twice",
                "scsi:4294967295:0:0:1",
                "scsi:4294967295:0:0:2",
            ],
        ),
    ] {
        for options in [&["--json"][..], &["--dry-run", "--json"]] {
            let output = apply(text, options);
            assert_eq!(output.status.code(), Some(2));
            let error = failure(&output);
            let message = error["message"].as_str().unwrap();
            for &word in expected {
                assert!(message.contains(word), "{word}: {message}");
            }
        }
    }
    let missing = lunbd(&["apply", "/no/such.toml"]);
    assert_eq!(missing.status.code(), Some(3), "{missing:?}");
    assert!(!std::path::Path::new(journal).exists());

    let output = apply(good, &["--dry-run"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        output.status.success() && text.starts_with("attach pvc-1: "),
        "{text}"
    );
    let output = apply(good, &["--dry-run", "--json"]);
    let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(plan["steps"][0]["kind"], "attach");
    assert_eq!(plan["steps"][0]["volume"], "pvc-1");
    let output = apply("volume = []", &["--dry-run"]);
    assert_eq!(output.stdout, b"nothing to do\n");
    let output = apply("", &["--dry-run"]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        said.contains("`volume = []` says that none is wanted"),
        "{said}"
    );
    assert_eq!(output.status.code(), Some(2));
    assert!(
        !std::path::Path::new(journal).exists(),
        "a dry run changes nothing"
    );

    let status = lunbd(&["status", "--journal", journal, "--json"]);
    let found: Value = serde_json::from_slice(&status.stdout).unwrap();
    assert_eq!(found["volumes"], serde_json::json!([]));
    assert!(status.status.success());
}

#[test]
fn a_truncated_record_is_moved_away_and_the_output_names_its_new_file() {
    let place = tempfile::tempdir().unwrap();
    let journal = place.path().join("journal");
    std::fs::create_dir(&journal).unwrap();
    std::fs::write(journal.join("journal.lock"), "").unwrap();
    let file = place.path().join("volumes.toml");
    std::fs::write(&file, "volume = []").unwrap();
    let arguments = |more: &'static [&str]| {
        let (file, journal) = (file.to_str().unwrap(), journal.to_str().unwrap());
        [&["apply", file, "--journal", journal], more].concat()
    };
    let truncated = "lunbd-journal 1 sha2";
    for (more, told, moved) in [(&[][..], true, 1), (&["--json"][..], false, 2)] {
        std::fs::write(journal.join("pvc-1.json"), truncated).unwrap();
        let output = lunbd(&arguments(more));
        let said = String::from_utf8(output.stderr).unwrap();
        let expected = "journal/pvc-1.json.set-aside";
        assert_eq!(said.contains(expected), told, "{said}");
        assert!(!journal.join("pvc-1.json").exists());
        let files = std::fs::read_dir(&journal).unwrap();
        let contents = files.map(|file| std::fs::read_to_string(file.unwrap().path()).unwrap());
        let kept = contents.filter(|content| content == truncated).count();
        assert_eq!(kept, moved);
    }
}

#[test]
fn recover_and_status_fail_while_a_record_is_set_aside() {
    let place = tempfile::tempdir().unwrap();
    let directory = place.path().to_str().unwrap();
    std::fs::write(place.path().join("journal.lock"), "").unwrap();
    let aside = place.path().join("pvc-1.json.set-aside-0");
    std::fs::write(&aside, "lunbd-journal 1 sha2").unwrap();
    let run = |command| lunbd(&[command, "--journal", directory, "--json"]);
    for command in ["recover", "status"] {
        let output = run(command);
        let code = if command == "status" { 9 } else { 1 };
        assert_eq!(output.status.code(), Some(code), "{command}: {output:?}");
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(
            report["problems"][0]["kind"], "set_aside_earlier",
            "{report}"
        );
    }
    std::fs::remove_file(&aside).unwrap();
    for command in ["recover", "status"] {
        let output = run(command);
        assert_eq!(output.status.code(), Some(0), "{command}: {output:?}");
    }
}

#[test]
fn what_the_engine_traces_is_shown_where_it_is_asked_for() {
    let list = |options: &[&str], variable: &str| {
        Command::new(env!("CARGO_BIN_EXE_lunbd"))
            .arg("list")
            .args(options)
            .env("LUNBD_LOG", variable)
            .output()
            .unwrap()
    };
    let said = |options: &[&str], variable| {
        let output = list(options, variable);
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    // At its start the engine says which events it listens to.
    assert_eq!(said(&[], ""), "");
    assert!(said(&["-v"], "").contains("listening"));
    assert!(said(&[], "info").contains("listening"));
    assert_eq!(said(&["-v"], "lunbd::nbd=info"), "");
    for line in said(&["-vv", "--json"], "").lines() {
        let _one_object: Value = serde_json::from_str(line).unwrap();
    }
    let refused = list(&[], "lunbd=loud");
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    let text = String::from_utf8(refused.stderr).unwrap();
    assert!(text.contains("LUNBD_LOG=lunbd=loud"), "{text}");
}

#[test]
fn list_and_doctor_answer_in_json_on_any_machine() {
    let list: Value = serde_json::from_slice(&lunbd(&["list", "--json"]).stdout).unwrap();
    assert!(list["units"].is_array());
    let doctor = lunbd(&["doctor", "--json"]);
    let report: Value = serde_json::from_slice(&doctor.stdout).unwrap();
    let ready = report["ready"].as_bool().unwrap();
    assert_eq!(doctor.status.code(), Some(if ready { 0 } else { 8 }));
    assert!(report["checks"].as_array().unwrap().len() > 5);
}

#[test]
fn where_no_portal_listens_discover_says_so_and_a_broken_file_of_secrets_is_not_shown() {
    let me = ["--initiator", "iqn.2026-01.example:me"];
    let unused = std::net::TcpListener::bind("127.0.0.2:0").unwrap();
    let portal = unused.local_addr().unwrap().to_string();
    drop(unused);
    let output = lunbd(&[&["discover", &portal, "--json"], &me[..]].concat());
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let error = failure(&output);
    assert_eq!(error["kind"], "unreachable");
    assert_eq!(error["stage"], "dial");

    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "user=me\nhush-hush\n").unwrap();
    let path = file.path().to_str().unwrap();
    let output = lunbd(&[&["discover", &portal, "--chap-file", path], &me[..]].concat());
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("line 2") && text.contains(path), "{text}");
    assert!(!text.contains("hush"), "{text}");

    for algorithms in ["", "SHA512", "SHA256,SHA256"] {
        let output = Command::new(env!("CARGO_BIN_EXE_lunbd"))
            .args(["discover", &portal])
            .args(me)
            .env("LUNBD_CHAP_USER", "me")
            .env("LUNBD_CHAP_SECRET", "hush-hush")
            .env("LUNBD_CHAP_ALGORITHMS", algorithms)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.contains("one or more of MD5, SHA1,"), "{text}");
    }
}

#[test]
fn a_file_of_secrets_has_sections_and_one_that_does_not_answer_is_not_waited_for() {
    let place = tempfile::tempdir().unwrap();
    let (file, silent) = (place.path().join("chap"), place.path().join("silent"));
    mkfifo(&silent, Mode::S_IRUSR).unwrap();
    let ask = |file: &std::path::Path| {
        let me = ["--initiator", "iqn.2026-01.example:me", "--timeout", "2s"];
        let file = ["--chap-file", file.to_str().unwrap(), "--json"];
        // No server listens at this port.
        lunbd(&[&["discover", "127.0.0.1:1"], &me[..], &file[..]].concat())
    };
    let section = "[127.0.0.1:1]\nuser=me\nsecret=hush\n";
    std::fs::write(&file, section).unwrap();
    assert_eq!(failure(&ask(&file))["kind"], "unreachable");
    std::fs::write(&file, section.replace(":1]", ":2]")).unwrap();
    let refused = ask(&file);
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    let text = String::from_utf8(refused.stderr).unwrap();
    assert!(text.contains("no section [127.0.0.1:1]"), "{text}");
    let timed_out = failure(&ask(&silent));
    assert_eq!(timed_out["kind"], "timed_out", "{timed_out}");
    assert_eq!(timed_out["stage"], "login", "{timed_out}");
}
