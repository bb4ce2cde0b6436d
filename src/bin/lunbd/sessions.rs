//! `lunbd sessions`

use std::io::{self, Write};
use std::process::ExitCode;

use lunbd::iscsi::{IscsiSession, SessionFacts};
use lunbd::{Result, Roots};
use serde::Serialize;

use crate::envelope::{self, Type};
use crate::{exit, table};

#[derive(Serialize)]
struct Sessions<'a> {
    sessions: &'a [SessionFacts],
}

pub(crate) fn run(json: bool) -> Result<ExitCode> {
    let mut sessions = Vec::new();
    for session in IscsiSession::all(&Roots::default())? {
        sessions.extend(session.facts()?);
    }
    sessions.sort_by_key(|session| session.id);
    Ok(exit::print(|mut out| {
        if json {
            let sessions = &sessions;
            envelope::write(&mut out, Type::Sessions, &Sessions { sessions })
        } else {
            write(out, &sessions)
        }
    }))
}

fn write(out: &mut dyn Write, sessions: &[SessionFacts]) -> io::Result<()> {
    if sessions.is_empty() {
        return writeln!(out, "no iSCSI sessions");
    }
    let columns = ["SESSION", "STATE", "MADE BY", "DEVICES", "PORTAL", "TARGET"];
    let mut rows = vec![columns.map(str::to_owned)];
    rows.extend(sessions.iter().map(|session| {
        let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        [
            session.id.to_string(),
            session.state.clone(),
            match (session.ours, session.creator) {
                (true, Some(-1) | None) => "lunbd".to_owned(),
                (true, Some(port)) => format!("lunbd from port {port}"),
                (false, _) => "another".to_owned(),
            },
            session.devices.len().to_string(),
            or_none(session.portal.as_ref().map(ToString::to_string)),
            or_none(session.target.as_ref().map(ToString::to_string)),
        ]
    }));
    table::write(out, &rows)
}
