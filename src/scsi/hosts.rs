//! The SCSI hosts of the machine.

use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::HostNo;
use crate::kernel::{Roots, sysfs};

/// Fails unless the host exists.
///
/// # Errors
/// `NoSuchHost`, naming the hosts that exist.
pub(crate) fn require_host(roots: &Roots, host: HostNo) -> Result<()> {
    let hosts = roots.sysfs.join("class/scsi_host");
    if hosts.join(format!("host{host}")).exists() {
        return Ok(());
    }
    let there = sysfs::names(&hosts)?;
    let there = if there.is_empty() {
        "no SCSI host at all".to_owned()
    } else {
        there.join(", ")
    };
    let message = format!("there is no SCSI host {host}; this machine has {there}");
    Err(Error::new(ErrorKind::NoSuchHost, message)
        .at(Stage::Resolve)
        .with_path(hosts))
}

/// The SCSI hosts, without those of one driver.
///
/// # Errors
/// Those of listing the hosts.
#[cfg(feature = "journal")]
pub(crate) fn hosts_without_driver(roots: &Roots, driver: &str) -> Result<Vec<HostNo>> {
    let class = roots.sysfs.join("class/scsi_host");
    let mut hosts = Vec::new();
    for name in sysfs::names(&class)? {
        let number = name.strip_prefix("host");
        let number: Option<HostNo> = number.and_then(|text| text.parse().ok());
        let of = sysfs::read_if_there(&class.join(&name).join("proc_name"))?;
        if of.as_deref() != Some(driver) {
            hosts.extend(number);
        }
    }
    Ok(hosts)
}
