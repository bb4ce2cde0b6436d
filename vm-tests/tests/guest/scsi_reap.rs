//! Stale LUNs: `scsi_debug` no longer has a LUN, or has another unit under its number, and the
//! kernel keeps the device.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;

use lunbd::engine::{DetachVolume, Evidence, ReapOutcome, ReapReport, ReapRequest, StaleLun};
use lunbd::{AttachRequest, Engine, ErrorKind, Source};
use serde_json::Value;
use vm_tests::guest::agent::{attach, engine, soon, unit};
use vm_tests::guest::{self, ScsiDebug};

fn reap(engine: &Engine) -> ReapReport {
    engine.reap(&ReapRequest::default(), soon()).unwrap()
}

fn dry_run(engine: &Engine) -> ReapReport {
    engine
        .reap(&ReapRequest::default().dry_run(), soon())
        .unwrap()
}

#[track_caller]
fn only(reaping: ReapReport) -> StaleLun {
    println!("{reaping:?}");
    let [stale_lun] = <[StaleLun; 1]>::try_from(reaping.stale_luns).expect("one stale LUN");
    stale_lun
}

/// Requires that the device stays, because of this user.
#[track_caller]
fn is_kept(engine: &Engine, by: &str) {
    for reaping in [dry_run(engine), reap(engine)] {
        let stale_lun = only(reaping);
        let ReapOutcome::Skipped(error) = stale_lun.outcome else {
            panic!("{stale_lun:?}");
        };
        assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
        assert!(error.to_string().contains(by), "no {by:?}: {error}");
        assert!(stale_lun.node.exists());
    }
}

#[test]
fn a_lun_that_its_target_no_longer_lists_is_reaped_only_without_a_mount_holder_swap_or_opener() {
    let engine = engine();
    let target = ScsiDebug::options().luns(4).size_mib(16).load();
    let kept = attach(&engine, &target, 0);
    let stale_lun = attach(&engine, &target, 3);
    assert!(reap(&engine).stale_luns.is_empty(), "all are there");
    let node = stale_lun.node.to_str().unwrap();
    guest::run(&["mkfs.ext4", "-q", "-F", node]);
    fs::create_dir_all("/tmp/stale").unwrap();
    guest::run(&["mount", "-t", "ext4", node, "/tmp/stale"]);
    target.set("max_luns", 2);
    is_kept(&engine, "mounted on /tmp/stale");
    target.set("max_luns", 4);
    guest::run(&["umount", "/tmp/stale"]);
    fs::remove_dir("/tmp/stale").unwrap();
    assert!(reap(&engine).stale_luns.is_empty(), "it is there again");

    guest::run(&["mkswap", node]);
    guest::run(&["swapon", node]);
    target.set("max_luns", 2);
    is_kept(&engine, "swapped on");
    target.set("max_luns", 4);
    guest::run(&["swapoff", node]);

    let table = format!("0 2048 linear {node} 0");
    guest::modprobe("dm_mod", &[]);
    guest::run(&[
        "dmsetup",
        "create",
        "--noudevsync",
        "on-top",
        "--table",
        &table,
    ]);
    target.set("max_luns", 2);
    let name = node.strip_prefix("/dev/").unwrap();
    let holders = guest::entries(format!("/sys/block/{name}/holders"));
    is_kept(&engine, &format!("held by {}", holders[0]));
    guest::udevd::settle();
    guest::run(&["dmsetup", "remove", "--noudevsync", "--retry", "on-top"]);

    let us = format!("open in process {}", std::process::id());
    let shared = File::open(node).unwrap();
    is_kept(&engine, &us);
    drop(shared);
    let mut exclusive = OpenOptions::new();
    let exclusive = exclusive.read(true).custom_flags(nix::libc::O_EXCL);
    let exclusive = exclusive.open(node).unwrap();
    is_kept(&engine, &us);
    drop(exclusive);
    guest::udevd::settle();

    assert_eq!(target.devices().len(), 2);
    let foreseen = only(dry_run(&engine));
    assert!(
        matches!(foreseen.outcome, ReapOutcome::Reapable),
        "{foreseen:?}"
    );
    assert_eq!(target.devices().len(), 2, "a dry run changes nothing");
    let reaped = only(reap(&engine));
    assert!(matches!(reaped.outcome, ReapOutcome::Reaped), "{reaped:?}");
    assert_eq!(
        (&reaped.node, reaped.diskseq),
        (&stale_lun.node, stale_lun.diskseq)
    );
    assert_eq!(Some(&reaped.identity), stale_lun.identity());
    let Evidence::NotListed { through, listed } = reaped.evidence else {
        panic!("{:?}", reaped.evidence);
    };
    assert_eq!((through.lun.kernel(), listed), (0, 2));
    assert_eq!(target.devices(), [format!("{}:0:0:0", target.host())]);
    assert!(kept.node.exists() && !stale_lun.node.exists());
    for link in &stale_lun.links {
        assert!(fs::symlink_metadata(link).is_err(), "{}", link.display());
    }
    assert!(reap(&engine).stale_luns.is_empty());
}

#[test]
fn a_device_that_is_only_offline_or_does_not_answer_is_left_alone() {
    let engine = engine();
    let target = ScsiDebug::options().luns(3).size_mib(16).load();
    attach(&engine, &target, 1);
    let state = target.device_dir(1).join("state");
    fs::write(&state, "offline\n").unwrap();
    let alone = reap(&engine);
    assert!(alone.stale_luns.is_empty(), "{alone:?}");
    assert_eq!(alone.unproven.len(), 1);
    assert!(alone.unproven[0].why.contains("state offline"), "{alone:?}");
    // Its target reports that the LUN exists.
    attach(&engine, &target, 0);
    let listed = reap(&engine);
    assert!(listed.stale_luns.is_empty(), "{listed:?}");
    assert_eq!(listed.unproven.len(), 1);
    fs::write(&state, "running\n").unwrap();

    // The whole target has gone: none of its LUNs has a connection.
    target.set("max_luns", 0);
    let silent = reap(&engine);
    println!("{silent:?}");
    assert!(silent.stale_luns.is_empty(), "{silent:?}");
    assert_eq!(silent.unproven.len(), 2);
    assert!(
        silent.unproven[0].why.contains("no connection"),
        "{silent:?}"
    );
    assert_eq!(target.devices().len(), 2);
    target.set("max_luns", 3);

    // The device is offline, and its target reports that the LUN is gone.
    guest::udevd::settle();
    fs::write(&state, "offline\n").unwrap();
    target.set("max_luns", 1);
    let reaped = only(reap(&engine));
    assert!(matches!(reaped.outcome, ReapOutcome::Reaped), "{reaped:?}");
    assert_eq!(target.devices().len(), 1);
}

/// `iscsi_reap` reaps the LUN of a unit with unique names.
#[test]
fn a_lun_whose_name_changed_is_left_where_no_name_of_it_is_unique() {
    let engine = engine();
    let target = ScsiDebug::options().luns(4).hosts(2).size_mib(16).load();
    target.set("vpd_use_hostno", 1);
    let source: Source = format!("scsi:{}:0:0:3", target.hosts()[1]).parse().unwrap();
    let old = engine.attach(&AttachRequest::new(source), soon()).unwrap();
    guest::udevd::settle();
    target.set("vpd_use_hostno", 0);
    for reaping in [dry_run(&engine), reap(&engine)] {
        assert!(reaping.stale_luns.is_empty(), "{reaping:?}");
        let [unproven] = &reaping.unproven[..] else {
            panic!("{reaping:?}");
        };
        assert_eq!(Some(unproven.hctl), old.hctl());
        assert!(unproven.why.contains("no name is unique"), "{unproven:?}");
    }
    assert_eq!(target.devices().len(), 1);
}

#[test]
fn a_volume_of_the_journal_is_named_and_left_and_the_command_prints_the_proof() {
    let place = format!("/tmp/reap-{}", std::process::id());
    let target = ScsiDebug::options().luns(4).size_mib(16).load();
    {
        let engine = engine();
        attach(&engine, &target, 0);
        attach(&engine, &target, 2);
        let journal = engine.open_journal_at(place.as_ref(), soon()).unwrap();
        let request = AttachRequest::new(unit(&target, 3));
        let volume = "pvc-1".parse().unwrap();
        engine
            .attach_volume(&journal, &volume, &request, soon())
            .unwrap();
    }
    guest::udevd::settle();
    target.set("max_luns", 1);
    // An agent holds the journal all the time.
    let agent = engine();
    let held = agent.open_journal_at(place.as_ref(), soon()).unwrap();
    let dry = guest::lunbd(&["reap", "--dry-run", "--journal", &place]);
    let text = String::from_utf8(dry.stdout).unwrap();
    assert!(text.contains("would be reaped"), "{text}");
    assert!(text.contains("reports 1 LUNs and not this one"), "{text}");
    let dry = guest::lunbd(&["reap", "--dry-run", "--json", "--journal", &place]);
    assert!(dry.status.success(), "{dry:?}");
    let found: Value = serde_json::from_slice(&dry.stdout).unwrap();
    let [idle, owned] = found["stale_luns"].as_array().unwrap().as_slice() else {
        panic!("{found}");
    };
    assert_eq!(idle["outcome"], "reapable");
    assert_eq!(idle["evidence"]["kind"], "not_listed");
    assert_eq!(owned["outcome"], "skipped");
    assert_eq!(owned["volume"], "pvc-1");
    assert_eq!(target.devices().len(), 3);

    let done = guest::lunbd(&["reap", "--journal", &place]);
    let text = String::from_utf8(done.stdout).unwrap();
    println!("{text}");
    assert_eq!(done.status.code(), Some(5), "{text}");
    assert!(text.contains("reports 1 LUNs and not this one"), "{text}");
    assert!(text.contains("volume    pvc-1"), "{text}");
    assert_eq!(target.devices().len(), 2);
    drop(held);

    // The volume's own detach removes it.
    let engine = engine();
    let journal = engine.open_journal_at(place.as_ref(), soon()).unwrap();
    let volume = "pvc-1".parse().unwrap();
    let how = DetachVolume::default().abandon_unwritten();
    engine
        .detach_volume(&journal, &volume, &how, soon())
        .unwrap();
    assert_eq!(target.devices().len(), 1);
    drop(journal);
    fs::remove_dir_all(&place).unwrap();
}

#[test]
fn beside_another_journal_the_volumes_of_the_machines_own_are_left_while_an_agent_holds_it() {
    let place = format!("/tmp/reap-other-{}", std::process::id());
    let target = ScsiDebug::options().luns(4).size_mib(16).load();
    let engine = engine();
    attach(&engine, &target, 0);
    let journal = engine.open_journal(soon()).unwrap();
    let other = engine.open_journal_at(place.as_ref(), soon()).unwrap();
    let volumes = [(&journal, "pvc-2", 2), (&other, "pvc-3", 3)];
    for (journal, volume, lun) in volumes {
        let request = AttachRequest::new(unit(&target, lun));
        let volume = volume.parse().unwrap();
        engine
            .attach_volume(journal, &volume, &request, soon())
            .unwrap();
    }
    guest::udevd::settle();
    target.set("max_luns", 1);
    let done = guest::lunbd(&["reap", "--json", "--journal", &place]);
    assert_eq!(done.status.code(), Some(5), "{done:?}");
    let found: Value = serde_json::from_slice(&done.stdout).unwrap();
    let left = found["stale_luns"].as_array().unwrap().iter();
    let left: Vec<_> = left.map(|it| (&it["outcome"], &it["volume"])).collect();
    assert_eq!(
        left,
        [
            (&"skipped".into(), &"pvc-2".into()),
            (&"skipped".into(), &"pvc-3".into())
        ]
    );
    assert_eq!(target.devices().len(), 3);
    for (journal, volume, _) in volumes {
        let how = DetachVolume::default().abandon_unwritten();
        let volume = volume.parse().unwrap();
        engine
            .detach_volume(journal, &volume, &how, soon())
            .unwrap();
        journal.forget(&volume, soon()).unwrap();
    }
    drop((journal, other));
    for journal in [place.as_str(), "/run/lunbd/journal"] {
        fs::remove_dir_all(journal).unwrap();
    }
}
