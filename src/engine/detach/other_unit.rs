//! Other units that a detach meets: at an address of its unit, which the array has given
//! to another volume, or below its map.

use crate::deadline::Deadline;
use crate::engine::detach::receipt::Flush;
use crate::engine::detach::run::DetachRun;
use crate::engine::unit::{KnownPath, PathIdentity, read_path};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::blockdev::BlockDevice;
use crate::multipath::Map;
use crate::scsi::{Comparison, Identity, ScsiDevice, Strength};

impl DetachRun<'_> {
    /// Decides about the paths at which the target has no unit: nothing can be written there. A
    /// path `below` a map that another path serves counts as silent, and so does one whose map was
    /// flushed: the map's data is stored over the other paths. Else what was written is lost, as
    /// where another unit answers.
    pub(super) fn decide_on_unmapped(&mut self, paths: &mut [KnownPath], below: &[BlockDevice]) {
        let is_below = |path: &KnownPath| path.disk.as_ref().is_some_and(|it| below.contains(it));
        let is_served = paths
            .iter()
            .any(|path| is_below(path) && matches!(path.identity_now, PathIdentity::Live(_)));
        for path in paths {
            let PathIdentity::NoUnit(was) = &path.identity_now else {
                continue;
            };
            let was = was.clone();
            let went_through_map = self.entry(&path.device).is_some_and(|entry| entry.in_map);
            path.identity_now = if went_through_map || is_served && is_below(path) {
                PathIdentity::Silent(was)
            } else {
                let now = Identity::default();
                PathIdentity::Replaced { was, now }
            };
        }
    }

    /// Once another unit has answered at a path, the path counts as replaced for the whole
    /// detach. Nothing may be written to the path even if it does not answer the next time.
    pub(super) fn keep_as_replaced(&mut self, paths: &mut [KnownPath]) {
        for path in paths {
            let known = self.replaced.iter().find(|(it, _)| *it == path.device);
            match (&path.identity_now, known) {
                (PathIdentity::Replaced { .. }, None) => {
                    let kept = (path.device.clone(), path.identity_now.clone());
                    self.replaced.push(kept);
                }
                (PathIdentity::Silent(_) | PathIdentity::NoUnit(_), Some((_, identity_now))) => {
                    path.identity_now = identity_now.clone();
                }
                _ => {}
            }
        }
    }

    /// Refuses a map over a disk that the kernel scanned as another unit, or that shares
    /// only names which are not unique, and that is therefore not in `paths`.
    ///
    /// # Errors
    /// `IdentityMismatch`, naming the disk to which the map's data would be written.
    pub(super) fn refuse_other_units_below(
        &self,
        map: &Map,
        paths: &[KnownPath],
        below: &[BlockDevice],
        deadline: Deadline,
    ) -> Result<()> {
        if self.unit.names.is_empty() {
            return Ok(());
        }
        let is_known = |disk: &&BlockDevice| paths.iter().all(|it| it.disk.as_ref() != Some(disk));
        for disk in below.iter().filter(is_known) {
            let device = match ScsiDevice::of_disk(disk) {
                Ok(Some(device)) => device,
                Ok(None) => continue,
                Err(error) if error.kind() == ErrorKind::NotSupported => continue,
                Err(error) => return Err(error.at(Stage::Identify)),
            };
            let path = read_path(self.engine, &device, deadline)?;
            let there = path.identity_now.answering_unit();
            match self.unit.compare(there) {
                Comparison::Same(Strength::Strong) => continue,
                Comparison::Unknown if !self.unit.differs_in_text_and_serial(there) => continue,
                _ => {}
            }
            let (map, disk, hctl) = (map.name(), disk.name(), device.hctl());
            let message = format!(
                "{disk} ({hctl}) is below the map {map} and is {there}, which does not prove \
                 that it is a path of this unit: nothing was written to the map or removed; \
                 make multipathd drop that path first"
            );
            let error = Error::new(ErrorKind::IdentityMismatch, message);
            return Err(error.at(Stage::Identify).with_found(&there.names));
        }
        Ok(())
    }
}

/// Refuses a path at which another unit answers and that is already in that unit's map.
///
/// # Errors
/// `InUse`, naming the map.
pub(super) fn refuse_maps_of_others(paths: &[KnownPath]) -> Result<()> {
    for path in paths {
        let (PathIdentity::Replaced { now, .. }, Some(disk)) = (&path.identity_now, &path.disk)
        else {
            continue;
        };
        let Some(map) = Map::of_path(disk)? else {
            continue;
        };
        if map.wwid().is_some_and(|name| now.is(&name)) {
            let (hctl, disk, map) = (path.device.hctl(), disk.name(), map.name());
            let message = format!("{disk} ({hctl}) is a path of the map {map} now, of {now}");
            // This state is not transient.
            return Err(Error::new(ErrorKind::InUse, message).at(Stage::Resolve));
        }
    }
    Ok(())
}

/// Refuses a map over a path that is now another unit's: data written to a map belongs to
/// the unit after which the map is named.
///
/// # Errors
/// `IdentityMismatch` where a path below the map was scanned as another unit since: the
/// map's data would be written there. A name that only multipathd's configuration spells
/// differently is no other unit.
pub(super) fn refuse_map_of_another(
    map: &Map,
    paths: &[KnownPath],
    below: &[BlockDevice],
) -> Result<()> {
    let Some(name) = map.wwid() else {
        return Ok(());
    };
    let of_map = Identity::of([name.clone()]);
    for path in paths {
        let scanned = match &path.identity_now {
            // The disk was the map's unit first.
            PathIdentity::Replaced { .. } => &path.device.cached_identity()?,
            known => known.of(),
        };
        let disk = path.disk.as_ref().filter(|disk| below.contains(disk));
        let is_another = !scanned.is(&name) && of_map.compare(scanned).is_proven_different();
        let Some(disk) = disk.filter(|_| is_another) else {
            continue;
        };
        let (map, disk, hctl) = (map.name(), disk.name(), path.device.hctl());
        let message = format!(
            "the map {map} is of {name}, and its path {disk} ({hctl}) is {scanned} now: what \
             was written to the map would go to that unit, so nothing was written or removed; \
             have the array give {hctl} back to {name} and detach again, or abandon unwritten \
             data: dmsetup wipe_table --noflush --nolockfs {map}, then dmsetup remove {map}"
        );
        let error = Error::new(ErrorKind::IdentityMismatch, message);
        return Err(error.at(Stage::Identify).with_found(&scanned.names));
    }
    Ok(())
}

/// The result in place of a flush if another unit answers at the path.
pub(in crate::engine) fn flush_if_replaced(path: &KnownPath) -> Option<Flush> {
    let PathIdentity::Replaced { now, .. } = &path.identity_now else {
        return None;
    };
    let hctl = path.device.hctl();
    Some(Flush::Replaced(if now.names.is_empty() {
        format!("no unit with a name answers at {hctl} now")
    } else {
        format!("{now} answers at {hctl} now")
    }))
}

/// The result in place of a flush if another unit answers at one of the disks `below` a
/// map.
pub(super) fn flush_if_replaced_below(paths: &[KnownPath], below: &[BlockDevice]) -> Option<Flush> {
    let is_below = |path: &&KnownPath| path.disk.as_ref().is_some_and(|it| below.contains(it));
    paths.iter().filter(is_below).find_map(flush_if_replaced)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::engine::Engine;
    use crate::engine::call::CallContext;
    use crate::engine::detach::remove_paths::tests::{path, run};
    use crate::engine::detach::{DetachRequest, DetachTarget};
    use crate::engine::telemetry::Call;
    use crate::id::Wwid;
    use crate::kernel::Roots;

    const OURS: &str = "naa.5000c500a1b2c3d4";
    const ANOTHERS: &str = "naa.5000c500ffffffff";

    fn unit(name: &str) -> Identity {
        Identity {
            names: vec![name.parse().unwrap()],
            ..Identity::default()
        }
    }

    /// Creates the map of the unit `name` over the disks of these paths.
    fn map_over(roots: &Roots, name: &str, paths: &[KnownPath]) -> Map {
        let dir = roots.sysfs.join("devices/virtual/block/dm-0");
        for below in ["dm", "slaves"] {
            fs::create_dir_all(dir.join(below)).unwrap();
        }
        let uuid = format!("mpath-{}", name.replace("naa.", "3"));
        for (file, text) in [("dev", "253:0"), ("dm/uuid", &uuid), ("dm/name", "m")] {
            fs::write(dir.join(file), format!("{text}\n")).unwrap();
        }
        fs::create_dir_all(roots.sysfs.join("block")).unwrap();
        symlink(&dir, roots.sysfs.join("block/dm-0")).unwrap();
        for disk in paths.iter().filter_map(|path| path.disk.as_ref()) {
            symlink(disk.dir(), dir.join("slaves").join(disk.name())).unwrap();
            fs::create_dir_all(disk.dir().join("holders")).unwrap();
            let device = disk.dir().ancestors().nth(2).unwrap();
            symlink(device, disk.dir().join("device")).unwrap();
            symlink(&dir, disk.dir().join("holders/dm-0")).unwrap();
        }
        Map::all(roots).unwrap().remove(0)
    }

    #[test]
    fn a_map_is_not_flushed_where_another_unit_answers_on_a_path_below_it() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let mut paths =
            [("1:0:0:4", "sdb"), ("2:0:0:4", "sdc")].map(|(hctl, disk)| path(&roots, hctl, disk));
        let below: Vec<_> = paths.iter().filter_map(|path| path.disk.clone()).collect();
        assert_eq!(flush_if_replaced_below(&paths, &below), None);
        let (was, now) = (Identity::default(), Identity::default());
        paths[1].identity_now = PathIdentity::Replaced { was, now };
        let Some(Flush::Replaced(why)) = flush_if_replaced_below(&paths, &below) else {
            panic!("it would be flushed");
        };
        assert!(why.contains("answers at 2:0:0:4 now"), "{why}");
        assert_eq!(flush_if_replaced_below(&paths, &below[..1]), None);
    }

    #[test]
    fn a_path_without_a_unit_is_silent_if_another_path_serves_its_map_and_else_replaced() {
        let root = tempfile::tempdir().unwrap();
        let engine = Engine::start(Roots::below(root.path())).unwrap();
        let request = DetachRequest::new(format!("unit:{OURS}").parse::<DetachTarget>().unwrap());
        let mut run = run(&engine, &request);
        let of = |hctl, disk| path(engine.roots(), hctl, disk);
        let mut paths = [of("1:0:0:4", "sdb"), of("2:0:0:4", "sdc")];
        let below: Vec<_> = paths.iter().filter_map(|path| path.disk.clone()).collect();
        run.add_to_receipt(&paths[1]).unwrap();
        let mut decide = |first: PathIdentity, below: &[BlockDevice], went_through_map| {
            run.entry(&paths[1].device).unwrap().in_map = went_through_map;
            paths[0].identity_now = first;
            paths[1].identity_now = PathIdentity::NoUnit(unit(OURS));
            run.decide_on_unmapped(&mut paths, below);
            paths[1].identity_now.clone()
        };
        let live = || PathIdentity::Live(unit(OURS));
        let silent = PathIdentity::Silent(unit(OURS));
        let (was, now) = (unit(OURS), Identity::default());
        let replaced = PathIdentity::Replaced { was, now };
        assert_eq!(decide(live(), &below, false), silent);
        assert_eq!(decide(live(), &below[..1], false), replaced);
        assert_eq!(decide(live(), &below[1..], false), replaced);
        assert_eq!(decide(silent.clone(), &below, false), replaced);
        assert_eq!(decide(live(), &[], true), silent);
    }

    #[test]
    fn a_path_that_is_in_the_map_of_the_unit_that_answers_now_is_in_use() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let mut paths = [path(&roots, "1:0:0:4", "sdb")];
        map_over(&roots, ANOTHERS, &paths);
        refuse_maps_of_others(&paths).unwrap();
        let (was, now) = (unit(OURS), unit(ANOTHERS));
        paths[0].identity_now = PathIdentity::Replaced { was, now };
        let error = refuse_maps_of_others(&paths).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InUse);
        assert!(error.to_string().contains("the map m"), "{error}");
    }

    #[test]
    fn a_map_over_a_disk_that_was_scanned_as_another_unit_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let engine = Engine::start(Roots::below(root.path())).unwrap();
        let roots = engine.roots();
        let request = DetachRequest::new(format!("unit:{OURS}").parse::<DetachTarget>().unwrap());
        let mut run = run(&engine, &request);
        run.unit = Identity::of([OURS.parse::<Wwid>().unwrap()]);
        let paths = [("1:0:0:4", "sdb"), ("2:0:0:4", "sdc")];
        let paths = paths.map(|(hctl, disk)| path(roots, hctl, disk));
        let map = map_over(roots, OURS, &paths);
        let below = map.paths().unwrap();
        assert_eq!(below.len(), 2);
        let soon = Deadline::after(std::time::Duration::from_secs(30));
        // A silent device has an unknown identity.
        run.refuse_other_units_below(&map, &paths[..1], &below, soon)
            .unwrap();
        for (name, refused) in [(OURS, false), (ANOTHERS, true)] {
            let mut page = vec![0, 0x83, 0, 12, 1, 3, 0, 8];
            let digits = name.strip_prefix("naa.").unwrap();
            page.extend(u64::from_str_radix(digits, 16).unwrap().to_be_bytes());
            fs::write(roots.sysfs.join("devices/2:0:0:4/vpd_pg83"), page).unwrap();
            let done = run.refuse_other_units_below(&map, &paths[..1], &below, soon);
            assert_eq!(done.is_err(), refused, "{done:?}");
            run.refuse_other_units_below(&map, &paths, &below, soon)
                .unwrap();
            if let Err(error) = done {
                assert_eq!(error.kind(), ErrorKind::IdentityMismatch);
                assert!(error.to_string().contains("sdc (2:0:0:4)"), "{error}");
                assert_eq!(error.found(), [ANOTHERS]);
            }
        }
        // Our name, with another T10 text and serial number.
        run.unit = Identity::of([OURS, "t10.VENDOR_1"].map(|name| name.parse().unwrap()));
        run.unit.serial = Some("1".to_owned());
        let dir = roots.sysfs.join("devices/2:0:0:4");
        let digits = OURS.strip_prefix("naa.").unwrap();
        let naa = u64::from_str_radix(digits, 16).unwrap().to_be_bytes();
        let text = [&[2, 1, 0, 9][..], b"VENDOR  2"].concat();
        let page = [&[0, 0x83, 0, 25, 1, 3, 0, 8][..], &naa, &text].concat();
        fs::write(dir.join("vpd_pg83"), page).unwrap();
        fs::write(dir.join("vpd_pg80"), [0, 0x80, 0, 1, b'2']).unwrap();
        let done = run.refuse_other_units_below(&map, &paths[..1], &below, soon);
        assert_eq!(done.unwrap_err().kind(), ErrorKind::IdentityMismatch);
    }

    #[test]
    fn a_detach_keeps_a_map_whose_path_belongs_to_another_unit_now() {
        let root = tempfile::tempdir().unwrap();
        let engine = Engine::start(Roots::below(root.path())).unwrap();
        let roots = engine.roots();
        let request = DetachRequest::new(format!("unit:{OURS}").parse::<DetachTarget>().unwrap());
        let mut run = run(&engine, &request);
        let mut one = path(roots, "1:0:0:4", "sdb");
        one.identity_now = PathIdentity::Live(unit(ANOTHERS));
        let map = map_over(roots, OURS, std::slice::from_ref(&one));
        run.named_devices = vec![one.device.clone()];
        run.first_paths = vec![one];
        run.receipt.map = None;
        let soon = Deadline::after(std::time::Duration::from_secs(30));
        let mut call = CallContext::new(Call::Detach, None, soon);
        let done = run.remove_present(&mut call);
        let error = done.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::IdentityMismatch, "{error}");
        assert_eq!(error.found(), [ANOTHERS]);
        for said in [OURS, ANOTHERS, "the map m", "sdb (1:0:0:4)"] {
            assert!(error.to_string().contains(said), "{error}");
        }
        assert!(run.receipt.map.is_none() && map.is_there());
        // A name that contradicts nothing, and a path outside the map, are accepted.
        let mut one = path(roots, "3:0:0:4", "sdd");
        let below = [one.disk.clone().unwrap()];
        one.identity_now = PathIdentity::Live(unit("t10.VENDOR_x"));
        refuse_map_of_another(&map, std::slice::from_ref(&one), &below).unwrap();
        one.identity_now = PathIdentity::Live(unit(ANOTHERS));
        refuse_map_of_another(&map, std::slice::from_ref(&one), &[]).unwrap();
        refuse_map_of_another(&map, std::slice::from_ref(&one), &below).unwrap_err();
    }

    #[test]
    fn a_replaced_path_stays_replaced_while_it_is_silent() {
        let root = tempfile::tempdir().unwrap();
        let engine = Engine::start(Roots::below(root.path())).unwrap();
        let request = DetachRequest::new(format!("unit:{OURS}").parse::<DetachTarget>().unwrap());
        let mut run = run(&engine, &request);
        let mut paths = [path(engine.roots(), "1:0:0:4", "sdb")];
        let (was, now) = (unit(OURS), unit(ANOTHERS));
        let another = PathIdentity::Replaced { was, now };
        paths[0].identity_now = another.clone();
        run.keep_as_replaced(&mut paths);
        paths[0].identity_now = PathIdentity::Silent(unit(OURS));
        run.keep_as_replaced(&mut paths);
        assert_eq!(paths[0].identity_now, another);
        paths[0].identity_now = PathIdentity::Live(unit(OURS));
        run.keep_as_replaced(&mut paths);
        assert_eq!(paths[0].identity_now, PathIdentity::Live(unit(OURS)));
    }
}
