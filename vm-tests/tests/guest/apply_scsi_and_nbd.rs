//! `lunbd apply` brings the volumes of a file to their wanted state.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use vm_tests::guest::agent::unit;
use vm_tests::guest::directory::Directory;
use vm_tests::guest::nbd_server::{At, NbdModule, NbdServer, Store};
use vm_tests::guest::{self, ScsiDebug, terminal};

/// The limit of one call, also on a machine that is several times slower.
const LIMIT: Duration = Duration::from_secs(120);
/// The limit of a test, which starts the command two dozen times.
const IN_ALL: Duration = Duration::from_secs(600);

/// A file of volumes and a journal.
struct Place(Directory);

impl Place {
    fn new() -> Self {
        guest::time_limit(IN_ALL);
        Self(Directory::new("apply"))
    }

    /// Writes the file as an editor does: another file replaces it.
    fn want(&self, volumes: &[(&str, &str)]) {
        let entry = |(id, source): &(&str, &str)| {
            format!("[[volume]]\nid = \"{id}\"\nsource = \"{source}\"\n")
        };
        let entries: Vec<String> = volumes.iter().map(entry).collect();
        // A file without any volume must say so, or it is refused.
        let none = volumes.is_empty().then_some("volume = []\n");
        self.write(&(entries.concat() + none.unwrap_or_default()));
    }

    fn write(&self, text: &str) {
        fs::write(self.0.join("new"), text).unwrap();
        fs::rename(self.0.join("new"), self.0.join("volumes.toml")).unwrap();
    }

    fn arguments<'a>(&self, options: &[&'a str]) -> Vec<std::borrow::Cow<'a, str>> {
        let file = self.0.join("volumes.toml").display().to_string();
        let mut arguments = vec!["apply".into(), file.into()];
        arguments.extend(["--journal".into(), self.journal().into()]);
        arguments.extend(options.iter().map(|&option| option.into()));
        arguments
    }

    fn journal(&self) -> String {
        self.0.join("journal").display().to_string()
    }

    fn apply(&self, options: &[&str]) -> Output {
        let arguments = self.arguments(options);
        let arguments: Vec<&str> = arguments.iter().map(|text| &**text).collect();
        let output = guest::lunbd(&arguments);
        println!("{}", String::from_utf8_lossy(&output.stdout));
        eprintln!("{}", String::from_utf8_lossy(&output.stderr));
        output
    }

    /// The volumes of the journal, with their conditions.
    fn status(&self) -> Vec<(String, String)> {
        let output = guest::lunbd(&["status", "--json", "--journal", &self.journal()]);
        let status = serde_json::from_slice(&output.stdout);
        let status: Value = status.unwrap_or_else(|error| panic!("{error}: {output:?}"));
        let volumes = status["volumes"].as_array().unwrap().iter();
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        volumes
            .map(|volume| (text(&volume["volume"]), text(&volume["condition"])))
            .collect()
    }

    #[track_caller]
    fn are_attached(&self, volumes: &[&str]) {
        let complete = |volume: &&str| ((*volume).to_owned(), "complete".to_owned());
        let expected: Vec<_> = volumes.iter().map(complete).collect();
        assert_eq!(self.status(), expected);
    }
}

fn text(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn is_connected(device: &str) -> bool {
    Path::new(&format!("/sys/block/{device}/pid")).exists()
}

#[test]
fn a_mixed_file_is_applied_changed_applied_again_and_emptied_and_a_broken_one_changes_nothing() {
    let _module = NbdModule::with_backend_ids(2);
    let target = ScsiDebug::options().luns(4).size_mib(16).load();
    let store = Store::sparse(8 << 20);
    let server = NbdServer::qemu_nbd(At::tcp(), "disk", store.path(), &[]);
    let place = Place::new();
    let lun = |number| unit(&target, number).to_string();
    let nbd = server.uri("disk");
    place.want(&[("a", &lun(1)), ("b", &lun(2)), ("n", &nbd)]);

    let dry = place.apply(&["--dry-run"]);
    assert!(dry.status.success(), "{dry:?}");
    let steps: Vec<String> = text(&dry).lines().map(str::to_owned).collect();
    assert_eq!(steps.len(), 3, "{steps:?}");
    assert!(
        steps.iter().all(|step| step.starts_with("attach ")),
        "{steps:?}"
    );
    assert_eq!(
        target.devices(),
        [] as [&str; 0],
        "a dry run changes nothing"
    );
    assert!(!is_connected("nbd0") && place.status().is_empty());

    let done = place.apply(&[]);
    assert!(done.status.success(), "{done:?}");
    let told = text(&done);
    for word in [
        "attach a: ",
        "a: attached as /dev/",
        "n: attached as /dev/nbd",
        "as it is wanted: 3 volumes",
    ] {
        assert!(told.contains(word), "{word}: {told}");
    }
    assert!(is_connected("nbd0"));
    place.are_attached(&["a", "b", "n"]);
    assert_eq!(target.devices().len(), 2);
    let shown = guest::lunbd(&["status", "--journal", &place.journal()]);
    assert!(shown.status.success());
    println!("{}", text(&shown));

    let again = place.apply(&[]);
    assert_eq!(text(&again), "nothing to do\nas it is wanted: 3 volumes\n");

    place.write("[[volume]]\nid = \"a\"\nsource = \"sda\"\n");
    let broken = place.apply(&["--json"]);
    assert_eq!(broken.status.code(), Some(2));
    let error: Value = serde_json::from_slice(&broken.stderr).unwrap();
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("line 3, column 10, source: "), "{message}");
    place.are_attached(&["a", "b", "n"]);

    place.want(&[("b", &lun(2)), ("c", &lun(3))]);
    let changed = place.apply(&["--json"]);
    assert!(changed.status.success(), "{changed:?}");
    let lines: Vec<Value> = text(&changed)
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let kinds: Vec<&str> = lines[0]["steps"]
        .as_array()
        .unwrap()
        .iter()
        .map(|step| step["kind"].as_str().unwrap())
        .collect();
    assert_eq!(kinds, ["detach", "detach", "attach"]);
    assert_eq!(lines.last().unwrap()["steps"], serde_json::json!([]));
    place.are_attached(&["b", "c"]);
    assert!(!is_connected("nbd0"));
    let mut devices = [2, 3].map(|lun| format!("{}:0:0:{lun}", target.host()));
    devices.sort();
    assert_eq!(target.devices(), devices);

    // A volume in use stays and is named, and all others are detached.
    let found = guest::lunbd(&["status", "--json", "--journal", &place.journal()]);
    let found: Value = serde_json::from_slice(&found.stdout).unwrap();
    let node = found["volumes"][0]["node"].as_str().unwrap();
    guest::run(&["mkfs.ext4", "-q", "-F", node]);
    let mount = place.0.join("mnt").display().to_string();
    fs::create_dir(&mount).unwrap();
    guest::run(&["mount", "-t", "ext4", node, &mount]);
    let shown = text(&guest::lunbd(&["status", "--journal", &place.journal()]));
    assert!(shown.contains(&mount) && shown.contains('%'), "{shown}");
    place.want(&[]);
    let left = place.apply(&[]);
    guest::run(&["umount", &mount]);
    assert_eq!(left.status.code(), Some(5), "{left:?}");
    let told = text(&left);
    assert!(
        told.contains("LEFT TO DO") && told.contains(&format!("mounted on {mount}")),
        "{told}"
    );
    place.are_attached(&["b"]);
    let gone = place.apply(&[]);
    assert!(gone.status.success(), "{gone:?}");
    assert_eq!(place.status(), []);
    assert_eq!(target.devices(), [] as [&str; 0]);
}

#[test]
fn apply_draws_the_plan_as_a_table_and_shows_progress_on_a_terminal() {
    const VOLUMES: u64 = 24;
    let target = ScsiDebug::options().luns(25).size_mib(16).load();
    let place = Place::new();
    let ids: Vec<String> = (1..=VOLUMES).map(|lun| format!("v{lun}")).collect();
    let sources: Vec<String> = (1..=VOLUMES)
        .map(|lun| unit(&target, lun).to_string())
        .collect();
    let volumes = ids.iter().zip(&sources);
    let volumes: Vec<_> = volumes.map(|(id, source)| (&**id, &**source)).collect();
    for (wanted, step) in [(&volumes[..], "attach"), (&[], "detach")] {
        place.want(wanted);
        if step == "detach" {
            let refused = place.apply(&[]);
            assert_eq!(refused.status.code(), Some(2));
            let said = String::from_utf8_lossy(&refused.stderr).into_owned();
            assert!(said.contains("would detach 24 of 24 volumes"), "{said}");
        }
        let arguments = place.arguments(&["--allow-detach", "all"]);
        let arguments: Vec<&str> = arguments.iter().map(|text| &**text).collect();
        let (status, drawn) = terminal::lunbd(&arguments);
        println!("{drawn}");
        assert!(status.success());
        let heading = drawn.lines().next().unwrap();
        let words: Vec<&str> = heading.split_whitespace().collect();
        assert_eq!(words, ["STEP", "VOLUME", "AFTER", "WHY"]);
        // A detach is drawn in red.
        let plain = |line: &str| line.trim_start_matches("\u{1b}[31m").to_owned();
        let rows = drawn.lines().filter(|line| plain(line).starts_with(step));
        assert_eq!(rows.count(), ids.len());
        // Each redraw shows how much is done, and which volume is at which stage.
        assert!(drawn.contains(&format!("of {VOLUMES} steps")));
        let is_at_work = |id: &String| drawn.contains(&format!(" {id}: {step}"));
        assert!(ids.iter().filter(|id| is_at_work(id)).count() > 1);
        assert!(drawn.contains("\u{1b}["), "lines are cleared");
    }
    // A pipe gets none of it.
    place.want(&volumes[..2]);
    let piped = place.apply(&[]);
    let piped = [piped.stdout, piped.stderr].concat();
    let piped = String::from_utf8(piped).unwrap();
    assert!(
        !piped.contains('\u{1b}') && !piped.contains("STEP"),
        "{piped}"
    );
    place.want(&[]);
    assert!(place.apply(&[]).status.success());
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
fn apply_watch_follows_the_file_and_reports_a_broken_version_without_applying_it() {
    let target = ScsiDebug::options().luns(4).size_mib(16).load();
    let place = Place::new();
    let lun = |number| unit(&target, number).to_string();
    place.want(&[("a", &lun(1))]);
    let errors = place.0.join("stderr");
    let arguments = place.arguments(&["--watch"]);
    let agent = Command::new("lunbd")
        .args(arguments.iter().map(|text| &**text))
        .stdout(Stdio::null())
        .stderr(fs::File::create(&errors).unwrap())
        .spawn()
        .unwrap();
    let agent = Agent(agent);
    let settles_on = |volumes: &[&str]| {
        guest::wait_until(&format!("{volumes:?}"), LIMIT, || {
            let expected: Vec<_> = volumes
                .iter()
                .map(|volume| ((*volume).to_owned(), "complete".to_owned()))
                .collect();
            (place.status() == expected).then_some(())
        });
    };
    settles_on(&["a"]);
    let held = place.apply(&[]);
    assert_eq!(held.status.code(), Some(5), "the agent has the journal");
    // An absent volume is reported, with the time of its next try.
    let absent = lun(77);
    place.want(&[("a", &lun(1)), ("absent", &absent)]);
    let status = |options: &[&str]| {
        let journal = place.journal();
        let output = guest::lunbd(&[&["status", "--journal", &journal], options].concat());
        assert!(output.stderr.is_empty(), "{output:?}");
        (output.status.code(), text(&output))
    };
    guest::wait_until("the failure to be told", LIMIT, || {
        let (_, told) = status(&["--json"]);
        let told: Value = serde_json::from_str(&told).unwrap();
        let [failing] = told["failing"].as_array().unwrap().as_slice() else {
            return None;
        };
        let of = |key: &str| failing[key].as_str().map(str::to_owned);
        assert_eq!(of("volume").as_deref(), Some("absent"));
        assert_eq!(of("step").as_deref(), Some("attach"));
        assert!(failing["next_try_seconds"].as_f64().unwrap() <= 120.0);
        of("next_try")
    });
    let (code, told) = status(&[]);
    println!("{told}");
    assert_eq!(code, Some(9));
    assert!(
        told.contains("\nabsent: attach failed ") && told.contains(", again in "),
        "{told}"
    );
    place.want(&[("b", &lun(2)), ("c", &lun(3))]);
    settles_on(&["b", "c"]);
    guest::wait_until("the failure to be forgotten", LIMIT, || {
        (status(&[]).0 == Some(0)).then_some(())
    });
    // A device that is attached anew has another directory.
    let devices = || {
        [2, 3].map(|number| {
            let device = fs::metadata(target.device_dir(number));
            device.expect("the volume is detached").ino()
        })
    };
    let before = devices();
    place.write("[[volume]]\nid = 7\n");
    guest::wait_until("the broken file to be told", LIMIT, || {
        let told = fs::read_to_string(&errors).unwrap();
        told.contains("line 2").then_some(())
    });
    place.are_attached(&["b", "c"]);
    // The agent has done all that it began for the broken version when it has done this.
    place.want(&[("a", &lun(1)), ("b", &lun(2)), ("c", &lun(3))]);
    settles_on(&["a", "b", "c"]);
    assert_eq!(devices(), before, "a volume was detached meanwhile");
    place.want(&[]);
    settles_on(&[]);
    guest::wait_until("all to be gone", LIMIT, || {
        target.devices().is_empty().then_some(())
    });
    drop(agent);
}
