//! The fake udevd: it receives the events of each disk, keeps a record and links, and reports
//! when it has finished.

use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Weak;
use std::sync::mpsc::Receiver;

use super::uevents::Uevent;
use super::{Kernel, replace};

/// Handles all events in order, until the kernel ends.
pub(super) fn run(kernel: &Weak<Kernel>, events: &Receiver<Uevent>) {
    for event in events {
        let Some(kernel) = kernel.upgrade() else {
            return;
        };
        drop(kernel.wait_while(kernel.state(), |state| state.udevd_is_stopped));
        let links = match &*event.subsystem {
            "block" => Some(kernel.handle(&event)),
            _ => None,
        };
        // It reports only block devices to its listeners.
        if let Some(links) = links {
            let mut told = event;
            told.of_udev = true;
            let dev = kernel.path("dev");
            let links: Vec<String> = links
                .iter()
                .map(|link| format!("/dev/{}", link.strip_prefix(&dev).unwrap().display()))
                .collect();
            told.more.push(("DEVLINKS".to_owned(), links.join(" ")));
            kernel.broadcast(&told);
        }
        kernel.change(|state| state.udevd_has -= 1);
    }
}

impl Kernel {
    /// Does what the rules do for one disk's event. Returns the disk's links after it.
    fn handle(&self, event: &Uevent) -> Vec<PathBuf> {
        let of = |key: &str| {
            let mut more = event.more.iter();
            let found = more.find(|(name, _)| name == key);
            found.map(|(_, value)| value.clone()).unwrap_or_default()
        };
        let record = self.path(&format!("run/udev/data/b{}:{}", of("MAJOR"), of("MINOR")));
        let node = self.path("dev").join(of("DEVNAME"));
        let before = self.links_in(&record);
        if event.action == "remove" {
            let _it_had_none = fs::remove_file(&record);
            Self::drop_links(&before, &node);
            return before;
        }
        // A worker that comes late to a removed disk changes nothing.
        let Some(links) = self.names_of(&of("DISKSEQ")) else {
            return before;
        };
        let links: Vec<PathBuf> = links
            .iter()
            .map(|link| self.path("dev").join(link))
            .collect();
        let old: Vec<PathBuf> = before
            .into_iter()
            .filter(|link| !links.contains(link))
            .collect();
        Self::drop_links(&old, &node);
        for link in &links {
            point(link, &node);
        }
        let dev = self.path("dev");
        let mut text = String::new();
        for link in &links {
            let below = link.strip_prefix(&dev).unwrap();
            writeln!(text, "S:{}", below.display()).unwrap();
        }
        replace(&record, &text);
        links
    }

    /// The links of a disk's record.
    fn links_in(&self, record: &Path) -> Vec<PathBuf> {
        let text = fs::read_to_string(record).unwrap_or_default();
        let links = text.lines().filter_map(|line| line.strip_prefix("S:"));
        links.map(|link| self.path("dev").join(link)).collect()
    }

    /// The links that the rules give to this instance of the disk, from its present data
    /// (`60-persistent-storage.rules`).
    fn names_of(&self, life: &str) -> Option<Vec<String>> {
        let state = self.state();
        let is_it = |disk: &super::disk::Disk| disk.life.to_string() == life;
        let (address, _) = state
            .devices
            .iter()
            .find(|(_, device)| device.disk.as_ref().is_some_and(is_it))?;
        let naa = state.units.get(address).map(|unit| unit.naa);
        let mut links = vec![format!("disk/by-diskseq/{life}")];
        if let Some(naa) = naa {
            links.push(format!("disk/by-id/scsi-3{naa:016x}"));
            links.push(format!("disk/by-id/wwn-0x{naa:016x}"));
        }
        Some(links)
    }

    /// Removes the links that lead to `node`. A link to another disk stays.
    fn drop_links(links: &[PathBuf], node: &Path) {
        for link in links {
            let leads_here = fs::read_link(link).is_ok_and(|to| to.file_name() == node.file_name());
            if leads_here {
                fs::remove_file(link).unwrap();
            }
        }
    }

    /// Stops udevd's handling, or lets it continue.
    pub(crate) fn stop_udevd(&self, stopped: bool) {
        self.change(|state| state.udevd_is_stopped = stopped);
    }
}

/// Points a link at a node, atomically.
fn point(link: &Path, node: &Path) {
    fs::create_dir_all(link.parent().unwrap()).unwrap();
    let new = link.with_extension("new");
    let _none_was_left = fs::remove_file(&new);
    symlink(super::relative(link, node), &new).unwrap();
    fs::rename(new, link).unwrap();
}
