//! `lunbd list`

use std::io::{self, Write};
use std::process::ExitCode;

use lunbd::engine::{Disk, DiskKind};
use lunbd::{Engine, Result};
use serde::Serialize;

use crate::exit;

#[derive(Serialize)]
struct Listing<'a> {
    disks: &'a [Disk],
}

pub(crate) fn run(engine: &Engine, json: bool) -> Result<ExitCode> {
    let disks = engine.list()?;
    Ok(exit::print(|mut out| {
        if json {
            exit::write_json(&mut out, &Listing { disks: &disks })
        } else {
            write(out, &disks)
        }
    }))
}

fn write(out: &mut dyn Write, disks: &[Disk]) -> io::Result<()> {
    if disks.is_empty() {
        return writeln!(out, "no SCSI disks and no connected NBD devices");
    }
    let mut rows = vec![
        [
            "SOURCE", "DEVICE", "SIZE", "STATE", "LINKS", "HELD BY", "NAME",
        ]
        .map(str::to_owned),
    ];
    rows.extend(disks.iter().map(row));
    let widths = rows.iter().fold([0; 7], |mut widths, row| {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
        widths
    });
    for row in &rows {
        let cells: Vec<String> = row
            .iter()
            .zip(widths)
            .map(|(cell, width)| format!("{cell:width$}"))
            .collect();
        writeln!(out, "{}", cells.join("  ").trim_end())?;
    }
    Ok(())
}

fn row(disk: &Disk) -> [String; 7] {
    let absent = || "-".to_owned();
    let node = disk.node.as_ref().map(|node| node.display().to_string());
    let size = disk
        .size
        .map(|size| indicatif::HumanBytes(size).to_string());
    let holders = (!disk.holders.is_empty()).then(|| disk.holders.join(","));
    let (named, name) = match &disk.kind {
        DiskKind::Scsi { hctl, cached_wwid } => (format!("scsi:{hctl}"), cached_wwid.clone()),
        DiskKind::Nbd { index, backend, .. } => (format!("nbd{index}"), backend.clone()),
        _ => (absent(), None),
    };
    let source = disk.source.as_ref().map(ToString::to_string);
    [
        source.unwrap_or(named),
        node.unwrap_or_else(absent),
        size.unwrap_or_else(absent),
        disk.state.clone().unwrap_or_else(absent),
        links(&disk.kind),
        holders.unwrap_or_else(absent),
        name.unwrap_or_else(absent),
    ]
}

/// SCSI names its paths one by one.
fn links(kind: &DiskKind) -> String {
    match kind {
        DiskKind::Nbd { connections, .. } => connections.to_string(),
        _ => "-".to_owned(),
    }
}
