//! Whether a device is a path of a unit, where the names do not prove it.
//!
//! Names that are not unique can be equal on unrelated targets ([`Comparison`]). A device
//! whose names agree with a unit's only weakly is therefore a path of that unit only with
//! further evidence: the caller named both, or both are the same LUN of the same target
//! port. A device at another iSCSI target belongs to another unit, even where the caller
//! named both.

use crate::engine::Engine;
use crate::error::{Error, ErrorKind, Result, Stage};
#[cfg(any(feature = "journal", test))]
use crate::id::Source;
use crate::id::{Hctl, Lun, Wwid};
use crate::kernel::Roots;
use crate::multipath::Map;
use crate::scsi::{Comparison, Identity, ScsiDevice, Strength};
use crate::transport::TargetPort;

/// The place of a device: its address, and the target port behind it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::engine) struct PathPlace {
    pub(in crate::engine) hctl: Hctl,
    port: Option<TargetPort>,
}

/// Whether two places lead to one unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::engine) enum PlaceComparison {
    /// The same LUN of the same target port.
    Same,
    /// Two LUNs of one target port, or two iSCSI targets.
    Different,
    /// Two Fibre Channel ports may belong to one target, other transports name no target,
    /// and a target may have a unit at both plain addresses of its number.
    Unknown,
}

/// Whether two LUNs of one target port are one unit.
fn compare_luns(ours: Lun, theirs: Lun) -> PlaceComparison {
    if ours == theirs {
        PlaceComparison::Same
    } else if are_addresses_of_one_number(ours, theirs) {
        PlaceComparison::Unknown
    } else {
        PlaceComparison::Different
    }
}

/// Whether two LUNs are the same number in the two plain addressings, such as 1 and
/// 16385.
pub(in crate::engine) fn are_addresses_of_one_number(ours: Lun, theirs: Lun) -> bool {
    let number = ours.plain_number();
    number.is_some() && number == theirs.plain_number()
}

impl PathPlace {
    pub(in crate::engine) fn of(roots: &Roots, device: &ScsiDevice) -> Self {
        let hctl = device.hctl();
        let port = TargetPort::of(roots, hctl, device.dir());
        Self { hctl, port }
    }

    pub(in crate::engine) fn compare(&self, other: &Self) -> PlaceComparison {
        let (ours, theirs) = (self.hctl, other.hctl);
        let by_lun = compare_luns(ours.lun, theirs.lun);
        let without_lun = |hctl: Hctl| (hctl.host, hctl.channel, hctl.target);
        if without_lun(ours) == without_lun(theirs) {
            return by_lun;
        }
        match (&self.port, &other.port) {
            (
                Some(TargetPort::Iscsi { target, group }),
                Some(TargetPort::Iscsi {
                    target: their_target,
                    group: their_group,
                }),
            ) => {
                if target != their_target {
                    PlaceComparison::Different
                } else if group == their_group {
                    by_lun
                } else {
                    PlaceComparison::Unknown
                }
            }
            (Some(TargetPort::Fc(port)), Some(TargetPort::Fc(theirs))) if port == theirs => by_lun,
            _ => PlaceComparison::Unknown,
        }
    }

    /// Whether a source leads to this place, through any portal.
    #[cfg(any(feature = "journal", test))]
    pub(in crate::engine) fn compare_source(&self, source: &Source) -> PlaceComparison {
        let by_lun = |lun| compare_luns(lun, self.hctl.lun);
        match (source, &self.port) {
            (Source::Scsi(hctl), _) => {
                let hctl = *hctl;
                Self { hctl, port: None }.compare(self)
            }
            (Source::Iscsi(uri), Some(TargetPort::Iscsi { target, .. })) => {
                if uri.target() == target {
                    by_lun(uri.lun())
                } else {
                    PlaceComparison::Different
                }
            }
            (Source::Fc(uri), Some(TargetPort::Fc(port))) if uri.ports().contains(port) => {
                by_lun(uri.lun())
            }
            _ => PlaceComparison::Unknown,
        }
    }
}

/// Whether two devices that the caller named may be paths of one unit, by the
/// identity that each reports.
pub(in crate::engine) fn may_be_one_unit(
    engine: &Engine,
    (one, identity): (&ScsiDevice, &Identity),
    (other, their_identity): (&ScsiDevice, &Identity),
) -> bool {
    match identity.compare(their_identity) {
        Comparison::Same(Strength::Strong) => true,
        Comparison::Same(Strength::Weak) => {
            let places =
                PathPlace::of(engine.roots(), one).compare(&PathPlace::of(engine.roots(), other));
            places != PlaceComparison::Different
        }
        _ => false,
    }
}

/// Whether a device that the caller did not name is a path of this unit. All of
/// `named_devices` are paths of it.
pub(in crate::engine) fn is_path_of(
    engine: &Engine,
    device: &ScsiDevice,
    identity: &Identity,
    unit: &Identity,
    named_devices: &[ScsiDevice],
) -> bool {
    match unit.compare(identity) {
        Comparison::Same(Strength::Strong) => true,
        Comparison::Same(Strength::Weak) => {
            let place = PathPlace::of(engine.roots(), device);
            let is_there = |device| {
                PathPlace::of(engine.roots(), device).compare(&place) == PlaceComparison::Same
            };
            named_devices.iter().any(is_there)
        }
        _ => false,
    }
}

/// A device that may be a path of a unit, and is not proven to be one.
#[derive(Debug)]
pub(in crate::engine) struct UnprovenPath {
    pub(in crate::engine) device: ScsiDevice,
    /// The unit that the disk was first, or the one in the kernel's copy if that is the wanted one.
    /// Where neither has a name, as the device answers.
    pub(in crate::engine) identity: Identity,
    /// It is a disk of which the kernel has read no name, it does not answer, and its medium
    /// cannot be removed.
    pub(in crate::engine) is_silent: bool,
}

/// Describes what may be left of a unit where names prove nothing: those of the `unproven_paths`
/// with its names or without an answer and, for a unit with only weak names, maps, except those
/// at other targets than the unit's paths. None is touched.
pub(in crate::engine) fn describe_unproven_remains(
    engine: &Engine,
    unit: &Identity,
    named_devices: &[ScsiDevice],
    unproven_paths: &[UnprovenPath],
) -> Result<Vec<String>> {
    let places = named_devices
        .iter()
        .map(|device| PathPlace::of(engine.roots(), device));
    let places: Vec<PathPlace> = places.collect();
    let is_elsewhere = |device: &ScsiDevice| {
        let place = PathPlace::of(engine.roots(), device);
        let mut places = places.iter().peekable();
        places.peek().is_some() && places.all(|it| it.compare(&place) == PlaceComparison::Different)
    };
    let mut doubts = Vec::new();
    for unproven in unproven_paths.iter().filter(|it| it.device.is_there()) {
        let UnprovenPath {
            device, identity, ..
        } = unproven;
        let reports = match unit.compare(identity) {
            Comparison::Same(_) if unit.is_weak() => {
                format!("reports {identity}, which is no unique name")
            }
            Comparison::Unknown if unit.differs_in_text_and_serial(identity) => format!(
                "reports {identity}, with another T10 text and serial number than this unit's"
            ),
            Comparison::Same(_) => {
                "reports this unit's name, and its disk was another unit first".to_owned()
            }
            _ if unproven.is_silent => {
                "does not answer, and the kernel has read no name of it".to_owned()
            }
            _ => continue,
        };
        if !is_elsewhere(device) {
            let hctl = device.hctl();
            doubts.push(format!(
                "{hctl} {reports}: it may be a path of this unit and was left in place"
            ));
        }
    }
    if unit.is_weak()
        && let Some(map) = Map::of_unit(engine.roots(), |name| unit.is(name))?
        && map.paths()?.is_empty()
    {
        let map = map.name();
        doubts.push(format!(
            "the map {map} has no path and a name that other units may have: it was left in \
             place"
        ));
    }
    Ok(doubts)
}

/// The error for a unit that was named by a name which other units may share.
pub(in crate::engine) fn weak_name_error(name: &Wwid, devices: &[ScsiDevice]) -> Error {
    let addresses: Vec<String> = devices.iter().map(|it| it.hctl().to_string()).collect();
    let addresses = addresses.join(" and ");
    let message = format!(
        "{name} is not unique, so another unit may have it too; {addresses} have it: name the \
         unit by its source, its address or its node"
    );
    Error::new(ErrorKind::IdentityMismatch, message).at(Stage::Resolve)
}

#[cfg(test)]
mod tests {
    use super::PlaceComparison::{Different, Same, Unknown};
    use super::*;

    fn at(hctl: &str, port: Option<TargetPort>) -> PathPlace {
        let hctl = hctl.parse().unwrap();
        PathPlace { hctl, port }
    }

    fn at_iscsi(hctl: &str, target: &str, group: u16) -> PathPlace {
        let target = format!("iqn.2026-01.example:{target}").parse().unwrap();
        let group = Some(group);
        at(hctl, Some(TargetPort::Iscsi { target, group }))
    }

    #[test]
    fn only_the_same_lun_of_the_same_target_port_supports_equal_names() {
        let port = |name: &str| Some(TargetPort::Fc(name.parse().unwrap()));
        let [one, other] = ["0x5000c500a1b2c3d4", "0x5000c500a1b2c3d5"];
        let iscsi = at_iscsi("1:0:0:4", "a", 1);
        let fc = at("1:0:0:4", port(one));
        let bare = at("1:0:0:4", None);
        for (here, there, expected) in [
            (&iscsi, at_iscsi("2:0:0:4", "a", 1), Same),
            (&iscsi, at_iscsi("2:0:0:5", "a", 1), Different),
            (&iscsi, at_iscsi("2:0:0:4", "b", 1), Different),
            // The flat address of LUN 4, and that of another number.
            (&iscsi, at_iscsi("1:0:0:16388", "a", 1), Unknown),
            (&iscsi, at_iscsi("1:0:0:16389", "a", 1), Different),
            (&iscsi, at_iscsi("2:0:0:4", "a", 2), Unknown),
            (&iscsi, at("2:0:0:4", None), Unknown),
            (&fc, at("2:0:0:4", port(one)), Same),
            (&fc, at("2:0:0:5", port(one)), Different),
            (&fc, at("2:0:0:4", port(other)), Unknown),
            (&bare, at("1:0:0:5", None), Different),
            (&bare, at("2:0:0:4", None), Unknown),
        ] {
            assert_eq!(here.compare(&there), expected, "{here:?} and {there:?}");
        }
    }

    #[test]
    fn a_source_names_a_place_by_its_target_whatever_the_portal() {
        let here = at_iscsi("1:0:0:4", "a", 1);
        for (source, expected) in [
            ("iscsi://192.0.2.9/iqn.2026-01.example:a/4", Same),
            ("iscsi://192.0.2.9/iqn.2026-01.example:a/5", Different),
            ("iscsi://192.0.2.9/iqn.2026-01.example:b/4", Different),
            ("scsi:1:0:0:4", Same),
            ("scsi:1:0:0:5", Different),
            ("scsi:1:0:0:16388", Unknown),
            ("scsi:2:0:0:4", Unknown),
        ] {
            let found = here.compare_source(&source.parse().unwrap());
            assert_eq!(found, expected, "{source}");
        }
    }
}
