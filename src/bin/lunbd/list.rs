//! `lunbd list`

use std::fmt::Display;
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Duration;

use indicatif::HumanBytes;
use lunbd::engine::{
    FileSystem, InventoryPath, InventoryUnit, NbdUnit, NotLookedAt, ScsiUnit, UnitKind,
};
use lunbd::kernel::file_system::Usage;
use lunbd::{Deadline, Engine, Result};
use serde::Serialize;

use crate::envelope::{self, Type};
use crate::{exit, table};

const HEADING: [&str; 8] = [
    "SOURCE", "DEVICE", "SIZE", "USED", "STATE", "PATHS", "HELD BY", "NAME",
];

/// How long the mounted file systems may take to report their usage.
const LIMIT: Duration = Duration::from_secs(3);

/// A unit, and the usage of its file systems.
#[derive(Serialize)]
pub(crate) struct Listed {
    #[serde(flatten)]
    pub(crate) unit: InventoryUnit,
    file_systems: Vec<FileSystem>,
}

impl Listed {
    pub(crate) fn of(engine: &Engine, unit: InventoryUnit, deadline: Deadline) -> Self {
        Self {
            file_systems: engine.file_systems(&unit, deadline),
            unit,
        }
    }

    /// The usage of each file system, in the order of their device numbers.
    pub(crate) fn used(&self) -> String {
        let shares: Vec<String> = self
            .file_systems
            .iter()
            .map(|file_system| match &file_system.usage {
                Some(usage) => share(usage),
                None => "no answer".to_owned(),
            })
            .collect();
        or_dash((!shares.is_empty()).then(|| shares.join(", ")))
    }
}

#[derive(Serialize)]
struct List {
    units: Vec<Listed>,
    not_looked_at: Vec<NotLookedAt>,
}

type Row = [String; HEADING.len()];

pub(crate) fn run(engine: &Engine, json: bool) -> Result<ExitCode> {
    let deadline = Deadline::after(LIMIT);
    let inventory = engine.inventory()?;
    let units = inventory.units.into_iter();
    let units = units.map(|unit| Listed::of(engine, unit, deadline));
    let list = List {
        units: units.collect(),
        not_looked_at: inventory.not_looked_at,
    };
    Ok(exit::print(|mut out| {
        if json {
            envelope::write(&mut out, Type::Inventory, &list)
        } else {
            write(out, &list)
        }
    }))
}

fn write(out: &mut dyn Write, list: &List) -> io::Result<()> {
    for place in &list.not_looked_at {
        writeln!(out, "not seen: {place}")?;
    }
    if list.units.is_empty() {
        return writeln!(out, "no SCSI disks and no connected NBD devices");
    }
    let mut rows = vec![HEADING.map(str::to_owned)];
    rows.extend(list.units.iter().flat_map(rows_of));
    table::write(out, &rows)
}

/// A row for the unit, and one for each path if there are several paths or a map.
fn rows_of(listed: &Listed) -> Vec<Row> {
    match &listed.unit.kind {
        UnitKind::Scsi(scsi) => {
            let alone = scsi.map.is_none() && scsi.paths.len() == 1;
            let paths = scsi.paths.iter().filter(|_| !alone).map(path_row);
            let mut rows = vec![scsi_row(listed, scsi)];
            rows.extend(paths);
            rows
        }
        UnitKind::Nbd(nbd) => vec![nbd_row(listed, nbd)],
        _ => Vec::new(),
    }
}

fn scsi_row(listed: &Listed, scsi: &ScsiUnit) -> Row {
    let unit = &listed.unit;
    let (source, node) = match (&scsi.map, scsi.paths.as_slice()) {
        (Some(map), _) => (map.name.clone(), Some(&map.node)),
        (None, [path]) => (format!("scsi:{}", path.hctl), path.node.as_ref()),
        (None, _) => ("(no map)".to_owned(), None),
    };
    let mut state = summary(&scsi.paths);
    if scsi.sizes_differ {
        state.push_str(", sizes differ");
    }
    [
        source,
        or_dash(node.map(|node| node.display())),
        or_dash(unit.size.map(HumanBytes)),
        listed.used(),
        state,
        scsi.paths.len().to_string(),
        held_by(unit),
        or_dash(scsi.identity.wwid().map(|name| {
            let weak = if scsi.identity.is_weak() {
                " (weak)"
            } else {
                ""
            };
            format!("{name}{weak}")
        })),
    ]
}

fn path_row(path: &InventoryPath) -> Row {
    [
        format!("  scsi:{}", path.hctl),
        or_dash(path.node.as_ref().map(|node| node.display())),
        or_dash(path.size.map(HumanBytes)),
        String::new(),
        state(path).to_owned(),
        String::new(),
        String::new(),
        path.reach
            .as_ref()
            .map_or_else(String::new, ToString::to_string),
    ]
}

fn nbd_row(listed: &Listed, nbd: &NbdUnit) -> Row {
    let unit = &listed.unit;
    let source = nbd.source.as_ref().map(ToString::to_string);
    [
        source.unwrap_or_else(|| format!("nbd{}", nbd.index)),
        nbd.node.display().to_string(),
        or_dash(unit.size.map(HumanBytes)),
        listed.used(),
        nbd.state.to_string(),
        nbd.connections.to_string(),
        held_by(unit),
        nbd_name(nbd),
    ]
}

/// The backend id, unless the source is shown, and the names of the content.
fn nbd_name(nbd: &NbdUnit) -> String {
    let id = nbd.backend.iter().filter(|_| nbd.source.is_none()).cloned();
    let content = nbd.content.iter().flatten().map(ToString::to_string);
    let names: Vec<String> = id.chain(content).collect();
    or_dash((!names.is_empty()).then(|| names.join(", ")))
}

/// The percentage that df shows: of the space available to unprivileged users.
fn share(usage: &Usage) -> String {
    let (used, all) = (
        usage.used_bytes,
        usage.used_bytes.saturating_add(usage.available_bytes),
    );
    match u128::from(used)
        .saturating_mul(100)
        .checked_div(u128::from(all))
    {
        Some(percent) => format!("{percent}%"),
        None => "-".to_owned(),
    }
}

/// The state that all paths share, or how many of them run.
fn summary(paths: &[InventoryPath]) -> String {
    match paths.first().map(state) {
        Some(first) if paths.iter().all(|path| state(path) == first) => first.to_owned(),
        _ => {
            let running = paths.iter().filter(|path| state(path) == "running");
            format!("{} of {} running", running.count(), paths.len())
        }
    }
}

fn state(path: &InventoryPath) -> &str {
    path.state
        .as_ref()
        .map_or("unreadable", |state| state.as_str())
}

/// Mount points come first, since they say more than the devices between.
pub(crate) fn held_by(unit: &InventoryUnit) -> String {
    let mut names: Vec<String> = unit
        .mounts
        .iter()
        .map(|mount| mount.path.display().to_string())
        .chain(unit.swaps.iter().map(|_| "swap".to_owned()))
        .chain(unit.holders.iter().cloned())
        .collect();
    // One mount may be visible in several namespaces.
    let mut seen = std::collections::BTreeSet::new();
    names.retain(|name| seen.insert(name.clone()));
    or_dash((!names.is_empty()).then(|| names.join(",")))
}

pub(crate) fn or_dash(cell: Option<impl Display>) -> String {
    cell.map_or_else(|| "-".to_owned(), |cell| cell.to_string())
}
