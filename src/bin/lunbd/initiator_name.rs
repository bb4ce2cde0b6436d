//! `lunbd initiator-name`

use std::path::Path;
use std::process::ExitCode;

use lunbd::Result;
use lunbd::id::Iqn;
use lunbd::iscsi::{INITIATOR_NAME_FILE, create_initiator_name, initiator_name};
use serde::Serialize;

use crate::envelope::{self, Type};
use crate::{arguments, exit};

#[derive(Serialize)]
struct Report {
    initiator: Iqn,
    created: bool,
}

pub(crate) fn run(what: &arguments::InitiatorName, json: bool) -> Result<ExitCode> {
    let path = Path::new(INITIATOR_NAME_FILE);
    let created = if what.create {
        create_initiator_name(path)?
    } else {
        None
    };
    let report = Report {
        created: created.is_some(),
        initiator: created.map_or_else(|| initiator_name(path), Ok)?,
    };
    Ok(exit::print(|mut out| {
        if json {
            envelope::write(&mut out, Type::InitiatorName, &report)
        } else {
            writeln!(out, "{}", report.initiator)
        }
    }))
}
