//! A process with the name of a daemon that has a disk open for reading.

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// The process; dropping it ends it.
#[derive(Debug)]
pub struct NamedReader(Child);

impl NamedReader {
    /// Starts a process with this name. It has the disk open when this returns.
    #[must_use]
    pub fn start(name: &str, disk: &Path) -> Self {
        let script = "printf %s \"$0\" >/proc/self/comm && exec 3<\"$1\" && echo && read -r _";
        let mut child = Command::new("sh")
            .args(["-c", script, name])
            .arg(disk)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a shell");
        let output = child.stdout.as_mut().expect("its output");
        output.read_exact(&mut [0]).expect("it opens the disk");
        Self(child)
    }
}

impl Drop for NamedReader {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ended = self.0.wait();
    }
}
