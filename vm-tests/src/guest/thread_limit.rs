//! Limits the number of a process's threads.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use nix::mount::{MsFlags, mount, umount};

use super::directory::Directory;

const LIMIT: Duration = Duration::from_secs(60);

/// A cgroup with a limit of threads. It is removed on drop, when its processes have ended.
#[derive(Debug)]
pub struct ThreadLimit {
    root: Directory,
    group: PathBuf,
}

impl ThreadLimit {
    /// A cgroup without a limit so far.
    #[must_use]
    pub fn none() -> Self {
        let root = Directory::new("cgroup");
        let flags = MsFlags::empty();
        mount(None::<&str>, &*root, Some("cgroup2"), flags, None::<&str>).expect("cgroup2");
        let group = root.join("limited");
        write(&root.join("cgroup.subtree_control"), "+pids");
        fs::create_dir(&group).expect("a cgroup");
        Self { root, group }
    }

    /// From now on the processes of the group have at most `most` threads.
    pub fn set(&self, most: u32) {
        write(&self.group.join("pids.max"), &most.to_string());
    }

    /// Removes the limit.
    pub fn lift(&self) {
        write(&self.group.join("pids.max"), "max");
    }

    /// A `lunbd` command in the group.
    #[must_use]
    pub fn lunbd(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("sh");
        let enter = "echo $$ > \"$0\"; exec lunbd \"$@\"";
        command.args(["-c", enter]);
        command.arg(self.group.join("cgroup.procs")).args(arguments);
        command
    }
}

fn write(path: &Path, text: &str) {
    fs::write(path, text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}

impl Drop for ThreadLimit {
    fn drop(&mut self) {
        super::wait_until("the end of the group's processes", LIMIT, || {
            fs::remove_dir(&self.group).ok()
        });
        write(&self.root.join("cgroup.subtree_control"), "-pids");
        umount(&*self.root).expect("unmounting cgroup2");
    }
}
