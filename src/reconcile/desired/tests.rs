use serde_json::json;

use super::*;
use crate::iscsi::{Credentials, CredentialsSource, Secret, SessionOptions, Tunable};

fn read(file: &serde_json::Value) -> std::result::Result<Desired, String> {
    serde_json::from_value(file.clone()).map_err(|error| error.to_string())
}

fn nbd(id: &str, source: &str) -> serde_json::Value {
    json!({ "id": id, "source": source })
}

#[test]
fn a_file_can_have_each_option_of_an_attach() {
    let file = json!({ "volume": [
        { "id": "a", "sources": ["scsi:2:0:0:1", "scsi:3:0:0:1"], "min_paths": 2,
          "expect": "naa.5000c500a1b2c3d4", "multipath": "require",
          "min_size": 17_179_869_184_u64 },
        { "id": "b", "source": "nbd://h/x", "nbd": {
            "backend": "x", "index": 3, "connections": 2, "read_only": true,
            "block_size": 4096,
            "io_timeout": "10s", "dead_connection_timeout": "1m 30s" } },
        { "id": "c", "source": "iscsi://10.0.0.1/iqn.2003-01.org.lunbd:array/1", "log_in": {
            "initiator": "iqn.2026-01.example:host", "chap_file": "/etc/lunbd/chap",
            "digests": true, "recovery_timeout": "5s",
            "tune": { "queue_depth": 64, "nop_interval": 0 },
            "interface": "eth1", "source_address": "10.0.0.7" } },
    ]});
    let desired = read(&file).unwrap();
    let a = desired.get(&"a".parse().unwrap()).unwrap();
    assert_eq!((a.sources.len(), a.min_paths), (2, 2));
    assert!(a.expect.is_some() && a.nbd.is_none());
    assert_eq!(desired.min_size(&"a".parse().unwrap()), Some(16 << 30));
    assert_eq!(desired.min_size(&"b".parse().unwrap()), None);
    let b = desired.get(&"b".parse().unwrap()).unwrap();
    let options = b.nbd.as_ref().unwrap();
    assert_eq!(options.backend.as_str(), "x");
    assert_eq!((options.connections.get(), options.read_only), (2, true));
    assert_eq!(options.block_size, Some(4096));
    assert_eq!(options.io_timeout_ms, 10_000);
    assert_eq!(options.dead_connection_timeout_ms, 90_000);
    let c = desired.get(&"c".parse().unwrap()).unwrap();
    let log_in = c.log_in.as_ref().unwrap();
    assert_eq!(log_in.initiator.as_str(), "iqn.2026-01.example:host");
    let file = CredentialsSource::File("/etc/lunbd/chap".into());
    assert_eq!(log_in.credentials, Some(file));
    assert!(log_in.header_digest && log_in.data_digest);
    assert_eq!(log_in.recovery_timeout_ms, Some(5_000));
    let chosen: Vec<_> = log_in.tune.iter().collect();
    assert_eq!(
        chosen,
        [(Tunable::NopInterval, 0), (Tunable::QueueDepth, 64)]
    );
    assert_eq!(log_in.interface, Some("eth1".parse().unwrap()));
    assert_eq!(log_in.source_address, Some("10.0.0.7".parse().unwrap()));
    let text = serde_json::to_string(c).unwrap();
    assert_eq!(serde_json::from_str::<VolumeSpec>(&text).unwrap(), *c);
    // The spec in a journal yields the request of the same attach.
    assert_eq!(VolumeSpec::of(&c.request().unwrap()), *c);
}

#[test]
fn digests_are_offered_required_or_left_out() {
    for (said, expected) in [
        (json!({}), (false, false)),
        (json!({ "digests": true }), (true, false)),
        (json!({ "digests": "require" }), (true, true)),
    ] {
        let desired = read(&logs_in(&said)).unwrap();
        let spec = desired.get(&"a".parse().unwrap()).unwrap();
        let log_in = spec.log_in.as_ref().unwrap();
        assert_eq!((log_in.data_digest, log_in.requires_digests), expected);
        // The spec in a journal yields the request of the same attach.
        assert_eq!(VolumeSpec::of(&spec.request().unwrap()), *spec);
    }
    let error = read(&logs_in(&json!({ "digests": "always" }))).unwrap_err();
    assert!(error.contains("true, false or"), "{error}");
}

fn logs_in(how: &serde_json::Value) -> serde_json::Value {
    let mut how = how.clone();
    how["initiator"] = "iqn.2026-01.example:host".into();
    let source = "iscsi://10.0.0.1/iqn.2003-01.org.lunbd:array/1";
    json!({ "volume": [{ "id": "a", "source": source, "log_in": how }] })
}

#[test]
fn a_session_uses_the_secrets_of_the_volume_with_its_target_portal_and_initiator() {
    let file = CredentialsSource::File("/etc/lunbd/chap".into());
    let without = nbd("b", "nbd://h/x");
    let mut volumes = logs_in(&json!({ "chap_file": "/etc/lunbd/chap" }));
    volumes["volume"].as_array_mut().unwrap().insert(0, without);
    let desired = read(&volumes).unwrap();
    let session = |initiator: &str, target: &str, portal: &str| SessionName {
        initiator: initiator.parse().unwrap(),
        target: target.parse().unwrap(),
        portal: portal.parse().unwrap(),
    };
    let (host, array) = ("iqn.2026-01.example:host", "iqn.2003-01.org.lunbd:array");
    let said = |session| desired.credentials_of(&session);
    assert_eq!(said(session(host, array, "10.0.0.1:3260")), Some(file));
    let other = "iqn.2026-01.example:other";
    assert_eq!(said(session(other, array, "10.0.0.1:3260")), None);
    assert_eq!(said(session(host, other, "10.0.0.1:3260")), None);
    assert_eq!(said(session(host, array, "10.0.0.2:3260")), None);
}

#[test]
fn a_volume_that_contains_a_secret_is_refused_and_the_error_does_not_show_it() {
    let source: Source = "iscsi://10.0.0.1/iqn.2003-01.org.lunbd:array/1"
        .parse()
        .unwrap();
    let options = SessionOptions::new("iqn.2026-01.example:host".parse().unwrap());
    let known = Credentials::new("joe", Secret::new("hush-hush").unwrap()).unwrap();
    let request = AttachRequest::new(source).log_in(options.credentials(known));
    let mut desired = Desired::default();
    let volume: VolumeId = "a".parse().unwrap();
    let error = desired.insert(volume, &request).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(
        error
            .to_string()
            .contains("volume a: the journal stores no CHAP secret"),
        "{error}"
    );
    let spec = serde_json::to_string(&VolumeSpec::of(&request)).unwrap();
    assert!(
        spec.contains("example:host") && !spec.contains("hush"),
        "{spec}"
    );
    assert!(!spec.contains("joe"), "{spec}");
}

#[test]
fn a_volume_with_a_mistake_is_refused_and_the_error_names_the_mistake() {
    let cases = [
        (json!({ "size": 1 }), "unknown field `size`"),
        (
            json!({ "nbd": { "timeout": "1s" } }),
            "unknown field `timeout`",
        ),
        (json!({ "min_size": -1 }), "invalid value: integer `-1`"),
        (json!({ "source": null }), "volume a: it has no source"),
        (json!({ "sources": ["nbd://h/y"] }), "not both"),
        (
            json!({ "source": "scsi:0:0:0:1", "nbd": {} }),
            "nbd is for NBD sources",
        ),
        (
            json!({ "source": null, "sources": ["nbd://h/x", "nbd://h/y"] }),
            "no further paths",
        ),
        (
            json!({ "expect": "naa.5000c500a1b2c3d4" }),
            "no world-wide name",
        ),
        (
            json!({ "nbd": { "io_timeout": "soon" } }),
            "\"soon\" is no duration",
        ),
        (json!({ "log_in": {} }), "log_in is for iSCSI sources"),
        (json!({ "id": "a\n" }), "printable"),
    ];
    for (keys, why) in cases {
        let mut volume = nbd("a", "nbd://h/x");
        let keys = keys.as_object().unwrap().clone();
        volume.as_object_mut().unwrap().extend(keys);
        let error = read(&json!({ "volume": [volume] })).unwrap_err();
        assert!(error.contains(why), "{error}");
    }
    let error = read(&json!({ "volumes": [] })).unwrap_err();
    assert!(error.contains("unknown field `volumes`"), "{error}");
}

#[test]
fn a_login_with_a_mistake_is_refused_and_the_error_names_the_mistake() {
    let relative = "volume a: the path of a CHAP file must be absolute";
    let no_timeout = "abort_timeout=0 is refused: it must be 1 to 3600";
    let bursts = json!({ "first_burst": 1024, "max_burst": 512 });
    let cases = [
        (json!({ "secret": "hush" }), "unknown field `secret`"),
        (
            json!({ "chap_file": "/a", "chap_variables": "B" }),
            "not both",
        ),
        (json!({ "chap_file": "chap" }), relative),
        (
            json!({ "recovery_timeout": "500ms" }),
            "a recovery timeout of 500ms is refused",
        ),
        (json!({ "tune": { "abort_timeout": 0 } }), no_timeout),
        (
            json!({ "tune": bursts }),
            "volume a: first_burst=1024 is refused",
        ),
        (json!({ "tune": { "depth": 1 } }), "queue_depth"),
    ];
    for (log_in, why) in cases {
        let error = read(&logs_in(&log_in)).unwrap_err();
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn two_volumes_that_claim_one_resource_are_refused_with_both_names() {
    let unit = |id: &str, source: &str| json!({ "id": id, "source": source, "expect": "naa.5000c500a1b2c3d4" });
    let backend = |id: &str, source: &str| json!({ "id": id, "source": source, "nbd": { "backend": "same" } });
    let cases = [
        (
            [nbd("one", "nbd://h/x"), nbd("two", "nbd://h/x")],
            "source nbd://h/x",
        ),
        (
            [backend("one", "nbd://h/x"), backend("two", "nbd://h/y")],
            "backend id same",
        ),
        (
            [unit("one", "scsi:0:0:0:1"), unit("two", "scsi:0:0:0:2")],
            "unit naa.5000c500a1b2c3d4",
        ),
        (
            [
                nbd("one", "iscsi://10.0.0.1/iqn.2003-01.org.lunbd:Array/1"),
                nbd("two", "iscsi://10.0.0.1/iqn.2003-01.org.lunbd:array/1"),
            ],
            "source iscsi://10.0.0.1:3260/iqn.2003-01.org.lunbd:array/1",
        ),
        (
            [
                nbd(
                    "one",
                    "iscsi://10.0.0.2,10.0.0.1/iqn.2003-01.org.lunbd:array/1",
                ),
                nbd(
                    "two",
                    "iscsi://10.0.0.1,10.0.0.3/iqn.2003-01.org.lunbd:array/1",
                ),
            ],
            "source iscsi://10.0.0.1:3260/iqn.2003-01.org.lunbd:array/1",
        ),
        (
            [
                nbd("one", "fc://0x1000000000000001,0x1000000000000002/1"),
                nbd("two", "fc://0x1000000000000002/1"),
            ],
            "source fc://0x1000000000000002/1",
        ),
    ];
    for (volumes, what) in cases {
        let error = read(&json!({ "volume": volumes })).unwrap_err();
        assert!(error.contains(what), "{error}");
        assert!(
            error.contains("volume one") && error.contains("volume two"),
            "{error}"
        );
    }
}

#[test]
fn one_volume_with_two_different_sources_is_refused_with_both() {
    let file = json!({ "volume": [nbd("one", "nbd://h/x"), nbd("one", "nbd://h/y")] });
    let error = read(&file).unwrap_err();
    for what in ["volume one", "nbd://h/x", "nbd://h/y"] {
        assert!(error.contains(what), "{error}");
    }
}

#[test]
fn the_resources_of_a_volume_are_free_when_it_is_no_longer_wanted() {
    let mut desired = read(&json!({ "volume": [nbd("one", "nbd://h/x")] })).unwrap();
    let source: Source = "nbd://h/x".parse().unwrap();
    let request = AttachRequest::new(source);
    let two: VolumeId = "two".parse().unwrap();
    assert!(desired.set_min_size(&two, Some(1)).is_err());
    assert!(desired.insert(two.clone(), &request).is_err());
    assert!(desired.remove(&"one".parse().unwrap()));
    desired.insert(two, &request).unwrap();
    assert_eq!(desired.len(), 1);
}

#[test]
fn two_files_that_differ_only_in_the_case_of_a_target_are_not_spelt_alike() {
    let wants = |target: &str| {
        let source = format!("iscsi://10.0.0.1/iqn.2003-01.org.lunbd:{target}/1");
        read(&json!({ "volume": [{ "id": "one", "source": source }] })).unwrap()
    };
    let (lower, capital) = (wants("array"), wants("Array"));
    assert_eq!(lower, capital);
    assert!(!lower.is_spelt_as(&capital));
    assert!(lower.is_spelt_as(&wants("array")));
}

#[test]
fn a_file_has_an_empty_end_if_it_announces_one() {
    let volumes = [nbd("a", "nbd://h/x")];
    let error = |file| read(&file).unwrap_err();
    let whole = json!({ "has_end": true, "volume": volumes, "end": {} });
    assert_eq!(read(&whole).unwrap().len(), 1);
    let cut = error(json!({ "has_end": true, "volume": volumes }));
    assert!(cut.contains("half a file"), "{cut}");
    let hidden = error(json!({ "volume": volumes, "end": {} }));
    assert!(hidden.contains("no `has_end = true`"), "{hidden}");
    let filled = error(json!({ "has_end": true, "volume": volumes, "end": { "id": "b" } }));
    assert!(filled.contains("unknown field `id`"), "{filled}");
}

#[test]
fn a_missing_iscsi_name_of_the_machine_is_not_reported_as_a_mistake_in_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let name = directory.path().join("initiatorname.iscsi");
    let mut file = logs_in(&json!({}));
    let volume = &mut file["volume"][0];
    volume["log_in"]
        .as_object_mut()
        .unwrap()
        .remove("initiator");
    let desired = || {
        let file: DesiredFile = serde_json::from_value(file.clone()).unwrap();
        file.desired(&name)
    };
    let error = desired().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    let text = error.to_string();
    let create = "lunbd initiator-name --create";
    assert!(
        text.contains("volume a: ") && text.contains(create),
        "{text}"
    );
    std::fs::write(&name, "InitiatorName=iqn.2026-01.example:host\n").unwrap();
    assert_eq!(desired().unwrap().len(), 1);
}
