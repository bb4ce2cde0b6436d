use super::*;

fn read(list: &str) -> Result<Discovered> {
    targets(list.as_bytes(), &"[::1]:3261".parse().unwrap())
}

fn shown(targets: &[DiscoveredTarget]) -> Vec<String> {
    let portal = |at: &TargetPortal| format!("{},{:?}", at.portal, at.group);
    let line = |target: &DiscoveredTarget| {
        let portals: Vec<_> = target.portals.iter().map(portal).collect();
        format!("{} {}", target.iqn, portals.join(" "))
    };
    targets.iter().map(line).collect()
}

#[test]
fn a_target_has_the_portals_that_follow_its_name() {
    let list = "TargetName=iqn.2026-01.example:a\0TargetAddress=10.0.0.1:3260,1\0\
                TargetAddress=[fe80::1]:3260,2\0TargetAddress=10.0.0.1,1\0\
                TargetName=iqn.2026-01.example:b\0X-note=hello\0\
                TargetName=IQN.2026-01.EXAMPLE:A\0TargetAddress=array.example:9,3\0";
    assert_eq!(
        shown(&read(list).unwrap().targets),
        [
            "iqn.2026-01.example:a 10.0.0.1:3260,Some(1) [fe80::1]:3260,Some(2) \
             array.example:9,Some(3)",
            "iqn.2026-01.example:b [::1]:3261,None",
        ]
    );
    assert!(read("").unwrap().targets.is_empty());
}

#[test]
fn a_record_that_no_login_could_use_is_skipped_and_named_and_the_others_are_found() {
    let list = "TargetName=iqn.2026-01.example:a\0TargetAddress=[fe80::1%eth0]:3260,1\0\
                TargetAddress=10.0.0.1,1\0TargetName=disk_\x31\0TargetAddress=10.0.0.2,1\0\
                TargetName=iqn.2026-01.example:b\0TargetAddress=10.0.0.3:70000,1\0\
                TargetName=iqn.2026-01.example:c\0";
    let found = read(list).unwrap();
    assert_eq!(
        shown(&found.targets),
        [
            "iqn.2026-01.example:a 10.0.0.1:3260,Some(1)",
            // The portal that was asked is not added, because the target names another.
            "iqn.2026-01.example:b ",
            "iqn.2026-01.example:c [::1]:3261,None",
        ]
    );
    let skipped: Vec<_> = found.skipped.iter().map(ToString::to_string).collect();
    for (record, why) in skipped.iter().zip([
        "TargetAddress=[fe80::1%eth0]:3260,1: ",
        "TargetName=disk_1: ",
        "TargetAddress=10.0.0.3:70000,1: ",
    ]) {
        assert!(record.starts_with(why), "{record}");
    }
    assert_eq!(skipped.len(), 3, "{skipped:?}");
}

#[test]
fn a_list_of_as_many_portals_as_a_target_likes_is_read_once_and_an_error_stays_short() {
    let name = "TargetName=iqn.2026-01.example:a\0".to_owned();
    let portals = (0..60_000).map(|number| format!("TargetAddress=h{number},1\0"));
    let list: String = std::iter::once(name).chain(portals).collect();
    let targets = read(&list).unwrap().targets;
    assert_eq!(targets[0].portals.len(), 60_000);
    let error = read(&format!("SendTargets={}\0", "x".repeat(100_000))).unwrap_err();
    assert!(error.to_string().len() < 4096);
}

#[test]
fn a_list_that_is_none_is_refused_by_its_key() {
    for (list, kind, shown) in [
        (
            "TargetAddress=10.0.0.1,1\0",
            ErrorKind::Protocol,
            "TargetAddress",
        ),
        ("SendTargets=Reject\0", ErrorKind::Refused, "Reject"),
        (
            "TargetName=iqn.2026-01.example:a",
            ErrorKind::Protocol,
            "zero byte",
        ),
    ] {
        let error = read(list).unwrap_err();
        assert_eq!(error.kind(), kind);
        assert!(error.to_string().contains(shown), "{error}");
    }
}
