//! The file that `lunbd apply --watch` follows, and what people and programs do to it.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::mount::{MsFlags, mount, umount};
use serde_json::Value;
use vm_tests::guest::agent::unit;
use vm_tests::guest::directory::Directory;
use vm_tests::guest::{self, ScsiDebug};

/// More than any step takes here, on a machine that is several times slower too.
const LIMIT: Duration = Duration::from_secs(120);
/// How long a whole sweep rewrites the file.
const WHOLE: Duration = Duration::from_secs(120);

/// A file of volumes on a file system of its own, a journal, and a target.
struct Rig {
    disk: FileSystem,
    place: Directory,
    target: ScsiDebug,
}

/// A small file system in memory.
struct FileSystem(PathBuf);

impl FileSystem {
    fn unmount(&self) {
        // The command reads the file now and then.
        guest::wait_until("the file system to be unmounted", LIMIT, || {
            umount(&self.0).ok()
        });
    }
}

impl Drop for FileSystem {
    fn drop(&mut self) {
        let _unmounted_already = umount(&self.0);
    }
}

/// The command. A drop kills it.
struct Agent(Child);

impl Drop for Agent {
    fn drop(&mut self) {
        let _ended_already = self.0.kill();
        let _ended_already = self.0.wait();
    }
}

impl Rig {
    fn new() -> Self {
        guest::time_limit(Duration::from_secs(600));
        let target = ScsiDebug::options().luns(4).size_mib(16).load();
        let place = Directory::new("followed");
        let disk = place.join("disk");
        fs::create_dir(&disk).unwrap();
        let (kind, size) = (Some("tmpfs"), Some("size=64k"));
        mount(Some("none"), &disk, kind, MsFlags::empty(), size).unwrap();
        fs::create_dir(disk.join("followed")).unwrap();
        Self {
            disk: FileSystem(disk),
            place,
            target,
        }
    }

    fn directory(&self) -> PathBuf {
        self.disk.0.join("followed")
    }

    fn file(&self) -> PathBuf {
        self.directory().join("volumes.toml")
    }

    fn journal(&self) -> PathBuf {
        self.place.join("journal")
    }

    /// The standard error of the command.
    fn errors(&self) -> PathBuf {
        self.place.join("errors")
    }

    /// How often the command has refused the file. It says so once for each error in a row.
    fn refusals(&self) -> usize {
        let said = fs::read_to_string(self.errors()).unwrap();
        said.matches("the file is refused").count()
    }

    fn source(&self, lun: u64) -> String {
        unit(&self.target, lun).to_string()
    }

    /// The file's text: another volume, and one that each version has.
    fn text(&self, other: u64) -> String {
        let volume = |id: &str, lun: u64| {
            format!(
                "[[volume]]\nid = \"{id}\"\nsource = \"{}\"\n",
                self.source(lun)
            )
        };
        let other = volume(&format!("other-{other}"), other);
        format!("has_end = true\n{other}{}[end]\n", volume("kept", 1))
    }

    fn start(&self) -> Agent {
        let mut command = Command::new("lunbd");
        command.arg("apply").arg(self.file()).arg("--watch");
        command.arg("--journal").arg(self.journal());
        let errors = fs::File::create(self.errors()).unwrap();
        let command = command.stdout(Stdio::null()).stderr(errors);
        let agent = Agent(command.spawn().unwrap());
        // The command answers while the journal does not exist or is new.
        let _any_volumes = self.status();
        agent
    }

    /// The volumes of the journal and their conditions.
    fn status(&self) -> Vec<(String, String)> {
        let journal = self.journal().display().to_string();
        let output = guest::lunbd(&["status", "--json", "--journal", &journal]);
        let status = serde_json::from_slice(&output.stdout);
        let status: Value = status.unwrap_or_else(|error| panic!("{error}: {output:?}"));
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let volumes = status["volumes"].as_array().unwrap().iter();
        let of = |volume: &Value| (text(&volume["volume"]), text(&volume["condition"]));
        volumes.map(of).collect()
    }

    fn settles_on(&self, other: u64, how: &str) {
        let expected = ["kept".to_owned(), format!("other-{other}")];
        let expected = expected.map(|volume| (volume, "complete".to_owned()));
        guest::wait_until(how, LIMIT, || {
            // This look is much cheaper than a start of the command.
            let is_attached = self.target.device_dir(other).exists();
            (is_attached && self.status() == expected).then_some(())
        });
    }

    /// A device that is attached anew has another directory.
    fn device(&self) -> u64 {
        let device = fs::metadata(self.target.device_dir(1)).expect("the volume is detached");
        device.ino()
    }
}

/// The name of a change, and the scripts that make it. The command refuses what each of them
/// leaves, except the last.
type Rewrite = (&'static str, &'static [&'static str]);

/// `$F` is the file, `$N` a file on another file system that has the new text, and `$D` the
/// directory.
const REWRITES: &[Rewrite] = &[
    ("an editor", &["cp $N $F.swp && mv $F.swp $F"]),
    ("cp", &["cp $N $F"]),
    // The command does not read a file that its writer has open.
    (
        "a slow copy",
        &[": > $F; exec 3>>$F; head -c 40 $N >&3; sleep 1; tail -c +41 $N >&3"],
    ),
    ("a copy after a removal", &["rm $F", "cp $N $F"]),
    ("mv", &["cp $N $D/other && mv $D/other $F"]),
    ("sed -i", &["sed -i 's/^id/id/' $F; cp $N $F"]),
    ("truncation, and later the text", &[": > $F", "cp $N $F"]),
    (
        "another link",
        &["cp $N $D/v1 && ln -s v1 $D/l && mv -T $D/l $F"],
    ),
    (
        "another directory",
        &[
            "cp -a $D $D.new && cp $N $D.new/volumes.toml && mv $D $D.old \
             && mv $D.new $D && rm -r $D.old",
        ],
    ),
    (
        "a full disk",
        &[
            ": > $F; dd if=/dev/zero of=$D/filler bs=4096 && exit 1; cp $N $F && exit 1; \
             test ! -s $F",
            "rm $D/filler && cp $N $F",
        ],
    ),
    ("an empty file", &["cp /dev/null $F", "cp $N $F"]),
    ("half a file", &["head -c 20 $N > $F", "cp $N $F"]),
    (
        "half a file that is a whole one with fewer volumes",
        &["head -n 4 $N > $F", "cp $N $F"],
    ),
    // The command runs as root, and root may read it.
    ("no permission", &["chmod 0 $F; chmod 644 $F; cp $N $F"]),
    (
        "a file that nobody can read, as it is a directory",
        &["rm $F; mkdir $F", "rmdir $F; cp $N $F"],
    ),
];

#[test]
fn however_the_file_is_rewritten_no_volume_that_each_version_wants_is_ever_detached() {
    let rig = Rig::new();
    fs::write(rig.file(), rig.text(2)).unwrap();
    let agent = rig.start();
    rig.settles_on(2, "the first version");
    let kept = rig.device();
    let begun = Instant::now();
    let mut rewrites = 0;
    let mut other = 2;
    while rewrites == 0 || guest::sweeps_are_whole() && begun.elapsed() < WHOLE {
        for (how, scripts) in REWRITES {
            other = if other == 2 { 3 } else { 2 };
            let new = rig.place.join("new.toml");
            fs::write(&new, rig.text(other)).unwrap();
            let shown = |path: &Path| path.display().to_string();
            for (number, script) in (1..).zip(*scripts) {
                let refusals = rig.refusals();
                let done = Command::new("sh")
                    .args(["-c", script])
                    .env("F", shown(&rig.file()))
                    .env("N", shown(&new))
                    .env("D", shown(&rig.directory()))
                    .status();
                assert!(done.unwrap().success(), "{how}");
                if number < scripts.len() {
                    guest::wait_until(&format!("{how}: a refusal"), LIMIT, || {
                        (rig.refusals() > refusals).then_some(())
                    });
                }
            }
            rig.settles_on(other, how);
            assert_eq!(rig.device(), kept, "{how}: the volume was detached");
            rewrites += 1;
        }
    }
    if guest::sweeps_are_whole() {
        guest::tell_whole_sweep(
            "rewrites of a followed file",
            format!("{rewrites} rewrites"),
            format!("{} ways", REWRITES.len()),
            begun.elapsed(),
        );
    }
    drop(agent);
}

#[test]
fn a_mount_over_the_file_is_followed() {
    let rig = Rig::new();
    fs::write(rig.file(), rig.text(2)).unwrap();
    let agent = rig.start();
    rig.settles_on(2, "the first version");
    let kept = rig.device();
    let new = rig.place.join("new.toml");
    fs::write(&new, rig.text(3)).unwrap();
    mount(
        Some(&new),
        &rig.file(),
        None::<&str>,
        MsFlags::MS_BIND,
        None::<&str>,
    )
    .unwrap();
    rig.settles_on(3, "the file that is mounted over it");
    // The events of the mounted file arrive.
    fs::write(&new, rig.text(2)).unwrap();
    rig.settles_on(2, "what was written to it");
    assert_eq!(rig.device(), kept);
    drop(agent);
    umount(&rig.file()).unwrap();
}

#[test]
fn the_command_ends_where_its_file_can_no_longer_be_followed_and_its_volumes_stay_attached() {
    let rig = Rig::new();
    fs::write(rig.file(), rig.text(2)).unwrap();
    let mut agent = rig.start();
    rig.settles_on(2, "the file");
    let kept = rig.device();
    rig.disk.unmount();
    let status = guest::wait_until("the end of the command", LIMIT, || {
        agent.0.try_wait().unwrap()
    });
    let said = fs::read_to_string(rig.errors()).unwrap();
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains("its file system was unmounted"), "{said}");
    rig.settles_on(2, "what stays");
    assert_eq!(rig.device(), kept);
}
