use std::fs;
use std::os::unix::fs::symlink;

use super::*;

const ONE: u8 = 0xd1;
const OTHER: u8 = 0xd2;

struct Machine {
    _root: tempfile::TempDir,
    roots: Roots,
    noted: Arc<ChangedNames>,
    units: Units,
}

fn name(last: u8) -> Wwid {
    format!("naa.5000c500a1b2c3{last:02x}").parse().unwrap()
}

impl Machine {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        fs::create_dir_all(roots.sysfs.join("bus/scsi/devices")).unwrap();
        let (units, noted) = Units::for_test();
        Self {
            _root: root,
            roots,
            noted,
            units,
        }
    }

    fn dir(&self, hctl: &str) -> PathBuf {
        let (target, _) = hctl.rsplit_once(':').unwrap();
        let target = format!("devices/target{target}");
        self.roots.sysfs.join(target).join(hctl)
    }

    fn link(&self, name: &str) -> PathBuf {
        self.roots.sysfs.join("bus/scsi/devices").join(name)
    }

    fn event(&self, hctl: &str) {
        let path = format!("/devices/target/{hctl}/scsi_device/{hctl}");
        self.noted.event(&path);
    }

    /// Adds the device to sysfs without an event.
    fn show(&self, hctl: &str, last: u8) {
        let dir = self.dir(hctl);
        fs::create_dir_all(&dir).unwrap();
        self.set_page(hctl, last);
        fs::write(dir.join("state"), "running\n").unwrap();
        fs::write(dir.join("rescan"), "").unwrap();
        let target = dir.parent().unwrap();
        let links = [dir.as_path(), target].map(|dir| {
            let link = self.link(dir.file_name().unwrap().to_str().unwrap());
            symlink(dir, link)
        });
        assert!(links[0].is_ok());
    }

    fn set_page(&self, hctl: &str, last: u8) {
        let naa = [0x50, 0, 0xc5, 0, 0xa1, 0xb2, 0xc3, last];
        let page = [&[0, 0x83, 0, 12, 2, 3, 0, 8][..], &naa].concat();
        fs::write(self.dir(hctl).join("vpd_pg83"), page).unwrap();
    }

    fn add(&self, hctl: &str, last: u8) {
        self.show(hctl, last);
        self.event(hctl);
    }

    fn candidates(&mut self, last: u8) -> Vec<String> {
        let wanted = name(last);
        let found = self.units.candidates(&self.roots, |name| *name == wanted);
        addresses(&found.unwrap().unwrap())
    }
}

fn addresses(devices: &[ScsiDevice]) -> Vec<String> {
    devices.iter().map(|it| it.hctl().to_string()).collect()
}

#[test]
fn a_device_that_another_process_adds_or_removes_is_seen_by_its_event() {
    let mut machine = Machine::new();
    machine.add("2:0:0:1", ONE);
    assert_eq!(machine.candidates(ONE), ["2:0:0:1"]);
    assert!(machine.candidates(OTHER).is_empty());
    machine.add("3:0:0:1", OTHER);
    machine.add("4:0:0:1", ONE);
    assert_eq!(machine.candidates(ONE), ["2:0:0:1", "4:0:0:1"]);
    assert_eq!(machine.candidates(OTHER), ["3:0:0:1"]);
    fs::remove_file(machine.link("2:0:0:1")).unwrap();
    fs::remove_dir_all(machine.dir("2:0:0:1")).unwrap();
    machine.event("2:0:0:1");
    assert_eq!(machine.candidates(ONE), ["4:0:0:1"]);
    // Another unit gets the address of the removed one.
    machine.add("2:0:0:1", OTHER);
    assert_eq!(machine.candidates(OTHER), ["2:0:0:1", "3:0:0:1"]);
}

#[test]
fn a_rescan_by_any_process_has_the_pages_read_again_though_no_event_tells_of_it() {
    let mut machine = Machine::new();
    machine.add("2:0:0:1", ONE);
    machine.add("3:0:0:1", OTHER);
    assert_eq!(machine.candidates(ONE), ["2:0:0:1"]);
    // The array has given the address to the other unit.
    machine.set_page("2:0:0:1", OTHER);
    assert_eq!(machine.candidates(OTHER), ["3:0:0:1"]);
    fs::write(machine.dir("2:0:0:1").join("rescan"), "1").unwrap();
    assert_eq!(machine.candidates(OTHER), ["2:0:0:1", "3:0:0:1"]);
    assert!(machine.candidates(ONE).is_empty());
    // The same holds for a device that was added at the address since.
    fs::remove_file(machine.link("2:0:0:1")).unwrap();
    fs::remove_dir_all(machine.dir("2:0:0:1")).unwrap();
    machine.add("2:0:0:1", ONE);
    assert_eq!(machine.candidates(ONE), ["2:0:0:1"]);
    machine.set_page("2:0:0:1", OTHER);
    fs::write(machine.dir("2:0:0:1").join("rescan"), "1").unwrap();
    assert_eq!(machine.candidates(OTHER), ["2:0:0:1", "3:0:0:1"]);
}

#[test]
fn a_device_that_a_process_sets_running_has_its_pages_read_again() {
    let mut machine = Machine::new();
    machine.add("2:0:0:1", ONE);
    assert_eq!(machine.candidates(ONE), ["2:0:0:1"]);
    machine.set_page("2:0:0:1", OTHER);
    assert!(machine.candidates(OTHER).is_empty());
    fs::write(machine.dir("2:0:0:1").join("state"), "running\n").unwrap();
    assert_eq!(machine.candidates(OTHER), ["2:0:0:1"]);
}

#[test]
fn lost_events_have_each_device_read_again() {
    let mut machine = Machine::new();
    machine.add("2:0:0:1", ONE);
    assert_eq!(machine.candidates(ONE), ["2:0:0:1"]);
    machine.show("3:0:0:1", ONE);
    assert_eq!(machine.candidates(ONE), ["2:0:0:1"]);
    machine.noted.mark_lost();
    assert_eq!(machine.candidates(ONE), ["2:0:0:1", "3:0:0:1"]);
}

#[test]
fn a_device_that_leaves_is_a_candidate_until_it_is_off_the_bus() {
    let mut machine = Machine::new();
    machine.add("2:0:0:1", ONE);
    assert_eq!(machine.candidates(ONE), ["2:0:0:1"]);
    // The event comes while the device is still on the bus, and its files go then.
    machine.event("2:0:0:1");
    for file in ["state", "rescan", "vpd_pg83"] {
        fs::remove_file(machine.dir("2:0:0:1").join(file)).unwrap();
        assert_eq!(machine.candidates(ONE), ["2:0:0:1"]);
    }
    fs::remove_file(machine.link("2:0:0:1")).unwrap();
    assert!(machine.candidates(ONE).is_empty());
    // Its directory stays until its cache is written, and another unit gets the address then.
    fs::remove_dir_all(machine.dir("2:0:0:1")).unwrap();
    machine.add("2:0:0:1", OTHER);
    assert!(machine.candidates(ONE).is_empty());
    assert_eq!(machine.candidates(OTHER), ["2:0:0:1"]);
}

#[test]
fn a_device_that_cannot_be_read_may_be_any_unit() {
    let mut machine = Machine::new();
    machine.add("2:0:0:1", ONE);
    let page = machine.dir("2:0:0:1").join("vpd_pg83");
    fs::remove_file(&page).unwrap();
    fs::create_dir(&page).unwrap();
    assert_eq!(machine.candidates(OTHER), ["2:0:0:1"]);
    fs::remove_dir(&page).unwrap();
    machine.set_page("2:0:0:1", ONE);
    assert!(machine.candidates(OTHER).is_empty());
}

#[test]
fn siblings_are_those_of_the_target_and_a_name_is_found_whichever_it_is() {
    let mut machine = Machine::new();
    for hctl in ["2:0:0:1", "2:0:0:2", "2:0:1:1"] {
        machine.add(hctl, ONE);
    }
    let device = ScsiDevice::find(&machine.roots, "2:0:0:1".parse().unwrap());
    let device = device.unwrap().unwrap();
    let (units, roots) = (&mut machine.units, &machine.roots);
    let siblings = units.sibling_candidates(roots, &device, &name(ONE));
    assert_eq!(addresses(&siblings.unwrap().unwrap()), ["2:0:0:2"]);
    let mut named = |last| units.candidates_with_name(roots, &name(last)).unwrap();
    assert!(named(OTHER).unwrap().is_empty());
    assert_eq!(named(ONE).unwrap().len(), 3);
}

#[test]
fn there_is_no_index_for_the_first_queries_of_a_process_and_none_without_events() {
    let mut machine = Machine::new();
    machine.add("2:0:0:1", ONE);
    let is_indexed = |machine: &mut Machine| {
        let candidates = machine.units.candidates(&machine.roots, |_| true);
        candidates.unwrap().is_some()
    };
    machine.units.queries = 0;
    for _ in 0..QUERIES_WITHOUT_INDEX {
        assert!(!is_indexed(&mut machine));
    }
    assert!(is_indexed(&mut machine));
    machine.units = Units::of(None);
    machine.units.queries = QUERIES_WITHOUT_INDEX;
    assert!(!is_indexed(&mut machine));
}

/// How many reads this thread has done.
fn reads() -> u64 {
    let io = fs::read_to_string("/proc/thread-self/io").unwrap();
    let count = io.lines().find_map(|line| line.strip_prefix("syscr: "));
    count.unwrap().parse().unwrap()
}

#[test]
fn the_questions_of_one_more_device_read_as_much_beside_a_thousand_others_as_beside_ten() {
    let read_beside = |others: u32| {
        let mut machine = Machine::new();
        for lun in 1..=others {
            machine.add(&format!("2:0:0:{lun}"), OTHER);
        }
        assert!(machine.candidates(ONE).is_empty());
        machine.add("3:0:0:1", ONE);
        let before = reads();
        assert_eq!(machine.candidates(ONE), ["3:0:0:1"]);
        reads() - before
    };
    let few = read_beside(10);
    assert!(few > 0);
    assert_eq!(read_beside(1000), few);
}
