use super::*;

fn path(flush: Flush) -> PathReceipt {
    PathReceipt {
        hctl: "2:0:0:1".parse().unwrap(),
        node: None,
        devno: None,
        diskseq: None,
        flush: Some(flush),
        gone: true,
        forgotten: None,
        in_map: false,
        wrote_own_pages: false,
    }
}

fn flushed() -> Receipt {
    Receipt {
        names: vec!["naa.5000c500a1b2c3d4".parse().unwrap()],
        paths: vec![path(Flush::Done), path(Flush::Done)],
        cache_was_flushed: true,
        ..Receipt::default()
    }
}

fn concluded(change: impl FnOnce(&mut Receipt)) -> bool {
    let mut receipt = flushed();
    change(&mut receipt);
    let mut paths = receipt.paths.iter();
    receipt.cache_was_flushed &= paths.any(|path| path.flush == Some(Flush::Done));
    receipt.conclude(Vec::new());
    assert_eq!(receipt.safe_to_unmap, receipt.notes.is_empty());
    receipt.safe_to_unmap
}

fn map(flush: Option<Flush>) -> MapReceipt {
    MapReceipt {
        name: "m".to_owned(),
        uuid: "mpath-m".to_owned(),
        node: PathBuf::from("/dev/dm-0"),
        told_to_fail: false,
        flush,
        gone: true,
    }
}

#[test]
fn it_is_safe_to_unmap_only_when_all_was_flushed_and_all_is_gone() {
    assert!(concluded(|_| {}));
    assert!(!concluded(|receipt| receipt.names.clear()));
    let vendors = "0VENDOR_disk".parse().unwrap();
    assert!(!concluded(|receipt| receipt.names = vec![vendors]));
    assert!(!concluded(|receipt| receipt.paths[1].gone = false));
    assert!(!concluded(|receipt| receipt.paths[1].flush = None));
    let unreachable = || path(Flush::Unreachable("ENXIO".to_owned()));
    assert!(!concluded(|receipt| receipt.paths[1] = unreachable()));
    assert!(!concluded(
        |receipt| receipt.paths[0].forgotten = Some(false)
    ));
}

#[test]
fn a_failure_after_a_completed_detach_keeps_its_conclusion() {
    for doubts in [vec![], vec!["a doubt".to_owned()]] {
        let mut receipt = flushed();
        receipt.conclude(doubts);
        let (notes, is_safe) = (receipt.notes.clone(), receipt.safe_to_unmap);
        assert_eq!(is_safe, notes.is_empty());
        let error = Error::new(ErrorKind::Io, "no");
        let failure = DetachFailure::after(error, Some(receipt));
        assert_eq!(failure.receipt.notes, notes);
        assert_eq!(failure.receipt.safe_to_unmap, is_safe);
    }
}

#[test]
fn the_answer_for_several_sources_is_as_safe_as_the_least_safe_of_them() {
    use crate::engine::detach::{Detachment, Place};

    let detached = |receipt: Option<Receipt>| {
        let place = Place::Scsi {
            hctl: None,
            name: None,
        };
        let mut detachment = Detachment::unchanged(place);
        if let Some(mut receipt) = receipt {
            detachment.changed = !receipt.paths.is_empty();
            receipt.conclude(Vec::new());
            detachment.safe_to_unmap = receipt.safe_to_unmap;
            detachment.receipt = Some(receipt);
        }
        detachment
    };
    let unit = |flush| {
        detached(Some(Receipt {
            names: vec!["naa.5000c500a1b2c3d4".parse().unwrap()],
            paths: vec![path(flush)],
            ..Receipt::default()
        }))
    };
    let safe = || unit(Flush::Done);
    let lossy = || unit(Flush::Abandoned("EIO".to_owned()));
    for both in [safe().and(lossy()), lossy().and(safe())] {
        assert!(both.changed && !both.safe_to_unmap);
        let receipt = both.receipt.unwrap();
        assert!(!receipt.safe_to_unmap);
        assert_eq!((receipt.paths.len(), receipt.notes.len()), (2, 1));
    }
    // A source for which nothing was there adds no note.
    for nothing in [None, Some(Receipt::default())] {
        assert!(safe().and(detached(nothing.clone())).safe_to_unmap);
        assert!(detached(nothing).and(safe()).safe_to_unmap);
    }
    let error = Error::new(ErrorKind::InUse, "no");
    let failure = DetachFailure::from(error).after_part(safe().receipt);
    assert!(failure.receipt.paths[0].gone && !failure.receipt.safe_to_unmap);
}

#[test]
fn a_path_that_another_process_removed_is_safe_only_if_we_flushed_it() {
    let taken = |flush| {
        concluded(|receipt| {
            receipt.paths[1].gone = false;
            receipt.paths[1].flush = flush;
            receipt.mark_all_gone();
        })
    };
    assert!(taken(Some(Flush::Done)));
    assert!(!taken(None));
}

#[test]
fn data_that_a_map_flushed_is_safe_although_one_path_is_dead() {
    let dead = || path(Flush::Unreachable("ENXIO".to_owned()));
    let beside = |in_map| {
        concluded(|receipt| {
            receipt.map = Some(map(Some(Flush::Done)));
            receipt.paths[1] = dead();
            receipt.paths[1].in_map = in_map;
        })
    };
    assert!(beside(true));
    assert!(!beside(false), "the map never saw what it held");
    assert!(!concluded(|receipt| {
        receipt.map = Some(map(Some(Flush::Done)));
        receipt.paths[1].flush = None;
    }));
    assert!(!concluded(|receipt| {
        receipt.map = Some(map(None));
    }));
    assert!(!concluded(|receipt| {
        receipt.map = Some(map(Some(Flush::Done)));
        receipt.map.as_mut().unwrap().gone = false;
    }));
}

#[test]
fn pages_that_paths_wrote_after_their_map_are_safe_only_if_a_path_flushed_the_units_cache() {
    let why = || "EIO".to_owned();
    let failures: [fn(String) -> Flush; 3] =
        [Flush::ThroughMap, Flush::PagesWritten, Flush::Unreachable];
    for failure in failures {
        let beside = |other: Flush| {
            concluded(|receipt| {
                receipt.map = Some(map(Some(Flush::Done)));
                receipt.paths = vec![path(failure(why())), path(other.clone())];
                for path in &mut receipt.paths {
                    (path.in_map, path.wrote_own_pages) = (true, true);
                }
            })
        };
        assert!(beside(Flush::Done));
        assert!(!beside(failure(why())), "no path flushed the cache");
        assert!(!beside(Flush::NoDisk), "no path flushed the cache");
        let without_flushes = concluded(|receipt| {
            receipt.map = Some(map(Some(Flush::Done)));
            receipt.paths = vec![path(failure(why())), path(Flush::Done)];
            receipt.cache_was_flushed = false;
            for path in &mut receipt.paths {
                (path.in_map, path.wrote_own_pages) = (true, true);
            }
        });
        assert!(!without_flushes, "the kernel sends no flush over the path");
    }
    let dead = |in_map| {
        concluded(|receipt| {
            receipt.map = Some(map(Some(Flush::Done)));
            receipt.paths = vec![path(Flush::Unreachable(why()))];
            receipt.paths[0].in_map = in_map;
        })
    };
    assert!(
        dead(true),
        "it was dead before, and all went through the map"
    );
    assert!(!dead(false));
}

#[test]
fn a_receipt_with_a_name_a_path_a_map_or_a_note_has_found_something() {
    let mut nothing = Receipt::default();
    assert!(nothing.found_nothing());
    nothing.conclude(Vec::new());
    assert!(nothing.found_nothing(), "{:?}", nothing.notes);
    let name = "naa.5000c500a1b2c3d4".parse().unwrap();
    let changes: [&dyn Fn(&mut Receipt); 4] = [
        &|receipt| receipt.names = vec![Wwid::clone(&name)],
        &|receipt| receipt.paths.push(path(Flush::Done)),
        &|receipt| receipt.map = Some(map(None)),
        &|receipt| receipt.notes.push("an earlier flush failed".to_owned()),
    ];
    for change in changes {
        let mut something = nothing.clone();
        change(&mut something);
        assert!(!something.found_nothing(), "{something:?}");
    }
}

#[test]
fn a_name_that_two_sources_share_is_listed_once_and_a_second_map_is_a_note() {
    let receipt = |names: &[&str]| Receipt {
        names: names.iter().map(|name| name.parse().unwrap()).collect(),
        map: Some(map(Some(Flush::Done))),
        ..Receipt::default()
    };
    let (first, second) = ("naa.5000c500a1b2c3d4", "naa.5000c500a1b2c3d5");
    for (gone, note) in [
        (true, "the map m is gone"),
        (false, "the map m is still there"),
    ] {
        let mut both = receipt(&[first]);
        let mut next = receipt(&[first, second]);
        next.map.as_mut().unwrap().gone = gone;
        both.append(next);
        let names: Vec<String> = both.names.iter().map(ToString::to_string).collect();
        assert_eq!(names, [first, second]);
        assert_eq!(both.notes, [note]);
    }
}

#[test]
fn a_failure_keeps_its_cause_and_tells_what_stands_where_a_part_was_taken_down() {
    let failed = |gone: &[bool]| {
        let paths = gone.iter().map(|gone| PathReceipt {
            gone: *gone,
            ..path(Flush::Done)
        });
        let receipt = Receipt {
            paths: paths.collect(),
            ..Receipt::default()
        };
        let error = Error::new(ErrorKind::Io, "no");
        DetachFailure::after(error.caused_by(fmt::Error), Some(receipt))
    };
    let whole = failed(&[]).error.to_string();
    for gone in [&[][..], &[true], &[true, true], &[false], &[false, false]] {
        assert_eq!(failed(gone).to_string(), whole, "{gone:?}");
    }
    let part = failed(&[true, false, false]);
    let expected = format!("{whole}; partly detached: 2:0:0:1, 2:0:0:1 remains");
    assert_eq!(part.to_string(), expected);
    assert_eq!(part.kind(), ErrorKind::Io);
    let cause = std::error::Error::source(&part).unwrap();
    assert!(cause.is::<fmt::Error>(), "{cause}");
}

#[test]
fn pages_that_were_written_are_safe_only_if_another_path_flushed_the_units_cache() {
    let standby = || path(Flush::PagesWritten("standby".to_owned()));
    assert!(concluded(|receipt| receipt.paths[1] = standby()));
    assert!(!concluded(|receipt| {
        receipt.paths = vec![standby(), standby()];
    }));
    let replaced = || path(Flush::Replaced("another".to_owned()));
    assert!(!concluded(|receipt| {
        receipt.paths = vec![standby(), replaced()];
    }));
}

#[test]
fn the_receipt_of_several_sources_has_the_map_and_the_unseen_places_of_each() {
    let mut whole = Receipt::default();
    let unseen = NotLookedAt::OtherPidNamespaces;
    whole.append(Receipt {
        map: Some(map(Some(Flush::Done))),
        not_looked_at: vec![unseen.clone()],
        ..Receipt::default()
    });
    assert!(whole.map.is_some());
    assert_eq!(whole.not_looked_at, [unseen]);
}

#[test]
fn a_detach_that_failed_says_that_it_is_incomplete() {
    let error = Error::new(ErrorKind::InUse, "no");
    let receipt = Receipt {
        safe_to_unmap: true,
        ..Receipt::default()
    };
    let failure = DetachFailure::new(error, receipt);
    assert!(!failure.receipt.safe_to_unmap);
    let notes = &failure.receipt.notes;
    assert!(
        notes.contains(&"the detach is incomplete".to_owned()),
        "{notes:?}"
    );
}
