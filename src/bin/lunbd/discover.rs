//! `lunbd discover`

use std::io::{self, Write};
use std::process::ExitCode;

use indicatif::HumanBytes;
use lunbd::id::{NbdServer, Portal};
use lunbd::iscsi::{Discovered, DiscoveryOptions, discover};
use lunbd::nbd::{self, handshake::DiscoveredExport};
use lunbd::{Deadline, Error, ErrorKind, Result};
use serde::Serialize;

use crate::arguments::DiscoverAt;
use crate::envelope::{self, Type};
use crate::{arguments, exit, progress::Progress, table};

#[derive(Serialize)]
struct Exports<'a> {
    exports: &'a [DiscoveredExport],
}

pub(crate) fn run(what: &arguments::Discover, json: bool) -> Result<ExitCode> {
    let deadline = Deadline::after(what.timeout);
    match &what.at {
        DiscoverAt::Iscsi(portal) => targets_of(portal, what, deadline, json),
        DiscoverAt::Nbd(_) if what.local.is_given() => {
            let message = "--interface and --source-address are for iSCSI portals";
            Err(Error::new(ErrorKind::InvalidInput, message))
        }
        DiscoverAt::Nbd(server) => exports_of(server, deadline, json),
    }
}

fn targets_of(
    portal: &Portal,
    what: &arguments::Discover,
    deadline: Deadline,
    json: bool,
) -> Result<ExitCode> {
    let mut options = DiscoveryOptions::new(what.who.initiator()?);
    if let Some(name) = &what.local.interface {
        options = options.interface(name.clone());
    }
    if let Some(address) = what.local.source_address {
        options = options.source_address(address);
    }
    if let Some(source) = what.who.credentials()? {
        options = options.credentials(source.read(None, portal, deadline)?);
    }
    let progress = Progress::of(&format!("asking {portal}"));
    let found = discover(portal, &options, deadline)?;
    drop(progress);
    Ok(exit::print(|mut out| {
        if json {
            envelope::write(&mut out, Type::Targets, &found)
        } else {
            write_targets(out, portal, &found)
        }
    }))
}

fn exports_of(server: &NbdServer, deadline: Deadline, json: bool) -> Result<ExitCode> {
    let progress = Progress::of(&format!("asking {server}"));
    let exports = nbd::discover(server, deadline)?;
    drop(progress);
    Ok(exit::print(|mut out| {
        if json {
            let exports = &exports;
            envelope::write(&mut out, Type::Exports, &Exports { exports })
        } else {
            write_exports(out, server, &exports)
        }
    }))
}

fn write_targets(out: &mut dyn Write, portal: &Portal, found: &Discovered) -> io::Result<()> {
    for record in &found.skipped {
        writeln!(out, "skipped {record}")?;
    }
    if found.targets.is_empty() {
        return writeln!(out, "{portal} shows no targets to this initiator");
    }
    let mut rows = vec![["TARGET", "PORTAL", "GROUP"].map(str::to_owned)];
    for target in &found.targets {
        rows.extend(target.portals.iter().map(|at| {
            let group = at
                .group
                .map_or_else(|| "-".to_owned(), |tag| tag.to_string());
            [target.iqn.to_string(), at.portal.to_string(), group]
        }));
    }
    table::write(out, &rows)
}

fn write_exports(
    out: &mut dyn Write,
    server: &NbdServer,
    exports: &[DiscoveredExport],
) -> io::Result<()> {
    if exports.is_empty() {
        return writeln!(out, "{server} lists no exports");
    }
    let mut rows = vec![["EXPORT", "SIZE", "BYTES", "FLAGS"].map(str::to_owned)];
    for listed in exports {
        // The name may contain control characters.
        let name = format!("{:?}", listed.name);
        rows.push(match (&listed.export, &listed.error) {
            (Some(export), _) => {
                let names = export.flags.iter_names();
                let names: Vec<_> = names.map(|(name, _)| name.to_ascii_lowercase()).collect();
                let size = HumanBytes(export.size).to_string();
                [name, size, export.size.to_string(), names.join(",")]
            }
            (None, error) => {
                let why = error.as_ref().map(ToString::to_string);
                let unknown = "-".to_owned();
                [name, unknown.clone(), unknown, why.unwrap_or_default()]
            }
        });
    }
    table::write(out, &rows)
}
