//! `lunbd discover`

use std::io::{self, Write};
use std::process::ExitCode;

use lunbd::id::Portal;
use lunbd::iscsi::{Discovered, DiscoveryOptions, discover};
use lunbd::{Deadline, Result};

use crate::{arguments, exit, progress::Progress, table};

pub(crate) fn run(what: &arguments::Discover, json: bool) -> Result<ExitCode> {
    let deadline = Deadline::after(what.timeout);
    let initiator = what.who.initiator()?;
    let mut options = DiscoveryOptions::new(initiator);
    if let Some(source) = what.who.credentials()? {
        options = options.credentials(source.read(None, &what.portal, deadline)?);
    }
    let progress = Progress::of(&format!("asking {}", what.portal));
    let found = discover(&what.portal, &options, deadline)?;
    drop(progress);
    Ok(exit::print(|mut out| {
        if json {
            exit::write_json(&mut out, &found)
        } else {
            write(out, &what.portal, &found)
        }
    }))
}

fn write(out: &mut dyn Write, portal: &Portal, found: &Discovered) -> io::Result<()> {
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
