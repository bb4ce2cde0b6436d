//! The processes that `/proc` shows.

use super::descriptor_tables::DescriptorTables;
use super::kernel_threads::KernelThreads;
use crate::error::Result;
use crate::kernel::{Roots, sysfs};

/// The processes that `/proc` shows.
pub(crate) fn pids(roots: &Roots) -> Result<Vec<u32>> {
    let names = sysfs::names(&roots.proc)?;
    Ok(names.iter().filter_map(|name| name.parse().ok()).collect())
}

/// The processes that `/proc` shows, without the children of kthreadd that are threads of the
/// kernel. These have the table of descriptors and the mount namespace of kthreadd, which is
/// included.
pub(crate) fn program_pids(roots: &Roots) -> Result<Vec<u32>> {
    let tables = DescriptorTables::read(roots);
    pids_without(roots, &KernelThreads::read(roots, &tables))
}

pub(super) fn pids_without(roots: &Roots, kernel_threads: &KernelThreads<'_>) -> Result<Vec<u32>> {
    let mut pids = pids(roots)?;
    pids.retain(|pid| !kernel_threads.has(*pid, &roots.proc.join(pid.to_string())));
    Ok(pids)
}
