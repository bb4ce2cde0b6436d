//! The house: a room uses its own floor's folder and the floors below it, never
//! one above, and two domains never use each other.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test panics to fail")]

use std::fs;
use std::path::{Path, PathBuf};

/// Each room of `src/` and the floor that it is on, the lowest first.
const ROOMS: &[(&str, Floor)] = &[
    ("crash", Floor::Values),
    ("error", Floor::Values),
    ("id", Floor::Values),
    ("deadline", Floor::Values),
    ("guide", Floor::Values),
    ("kernel", Floor::Doors),
    ("uevent", Floor::Doors),
    ("scsi", Floor::Domains),
    ("nbd", Floor::Domains),
    ("iscsi", Floor::Domains),
    ("transport", Floor::Domains),
    ("multipath", Floor::Domains),
    ("engine", Floor::Engine),
    ("reconcile", Floor::Standing),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Floor {
    Values,
    Doors,
    Domains,
    Engine,
    Standing,
}

fn floor(room: &str) -> Option<Floor> {
    let found = ROOMS.iter().find(|(name, _)| *name == room);
    found.map(|(_, floor)| *floor)
}

/// Why `room` may not use `used`.
fn fault(room: &str, used: &str) -> Option<String> {
    let (Some(at), Some(to)) = (floor(room), floor(used)) else {
        return Some(format!("{room} or {used} is on no floor: add it to ROOMS"));
    };
    if to > at {
        return Some(format!("{room} ({at:?}) goes up to {used} ({to:?})"));
    }
    let across = at == Floor::Domains && to == Floor::Domains && room != used;
    across.then(|| format!("the domain {room} uses the domain {used}"))
}

fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The rooms behind each `crate::` of a source, `use crate::{a::.., b::..}`
/// among them.
fn used_rooms(source: &str) -> Vec<String> {
    let mut rooms = Vec::new();
    for after in source.split("crate::").skip(1) {
        let word = |text: &str| -> String {
            text.chars()
                .take_while(|c| c.is_ascii_alphanumeric() || *c == '_')
                .collect()
        };
        if let Some(group) = after.strip_prefix('{') {
            let end = group.find(';').unwrap_or(group.len());
            let mut depth = 0;
            let mut item = String::new();
            for c in group[..end].chars() {
                match c {
                    '{' => depth += 1,
                    '}' => depth -= 1,
                    ',' if depth == 0 => rooms.push(word(std::mem::take(&mut item).trim())),
                    c if depth == 0 => item.push(c),
                    _ => {}
                }
            }
            rooms.push(word(item.trim()));
        } else {
            rooms.push(word(after));
        }
    }
    rooms.retain(|room| room.starts_with(|c: char| c.is_ascii_lowercase()));
    rooms
}

#[test]
fn no_room_uses_a_floor_above_it_or_another_domain() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&src, &mut files);
    let mut faults = Vec::new();
    let mut looked_at = 0;
    for file in &files {
        let below = file.strip_prefix(&src).unwrap();
        let first = below.components().next().unwrap();
        let room = first.as_os_str().to_str().unwrap().trim_end_matches(".rs");
        // lib.rs names the rooms, and the command line is no room.
        if matches!(room, "lib" | "bin") {
            continue;
        }
        looked_at += 1;
        for used in used_rooms(&fs::read_to_string(file).unwrap()) {
            faults.extend(fault(room, &used).map(|why| format!("{}: {why}", below.display())));
        }
    }
    assert!(looked_at > 20, "only {looked_at} files");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn the_command_line_uses_the_public_interface_alone() {
    let bin = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/bin/lunbd");
    let mut files = Vec::new();
    sources(&bin, &mut files);
    assert!(files.len() > 10, "only {} files", files.len());
    for file in &files {
        for used in used_rooms(&fs::read_to_string(file).unwrap()) {
            let own = bin.join(format!("{used}.rs")).exists();
            assert!(own, "{}: crate::{used}", file.display());
        }
    }
}

#[test]
fn a_way_up_or_across_is_found() {
    assert!(fault("kernel", "scsi").is_some());
    assert!(fault("scsi", "nbd").is_some());
    assert!(fault("error", "kernel").is_some());
    assert!(fault("engine", "reconcile").is_some());
    assert_eq!(fault("engine", "scsi"), None);
    assert_eq!(fault("scsi", "scsi"), None);
    let rooms =
        used_rooms("use crate::{id::{Lun, Hctl}, engine::Engine};\nlet x = crate::scsi::y;");
    assert_eq!(rooms, ["id", "engine", "scsi"]);
}
