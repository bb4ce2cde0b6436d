//! The second serial port, on which the host listens for reports.

use std::fs::{File, OpenOptions};
use std::io::Write;

use anyhow::{Context, Result};
use vm_tests::job::Report;

/// The console keeps the first port, so that kernel messages never split a report.
const PORT: &str = "/dev/ttyS1";

pub(crate) struct ReportLine(File);

impl ReportLine {
    pub(crate) fn open() -> Result<Self> {
        OpenOptions::new()
            .write(true)
            .open(PORT)
            .map(Self)
            .context(PORT)
    }

    pub(crate) fn try_clone(&self) -> Result<Self> {
        self.0.try_clone().map(Self).context(PORT)
    }

    pub(crate) fn send(&mut self, report: &Report) -> Result<()> {
        let mut line = serde_json::to_vec(report)?;
        line.push(b'\n');
        self.0.write_all(&line).context(PORT)
    }
}
