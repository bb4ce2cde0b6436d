//! What is known of the content of a device without asking its server.

use super::content;
use super::device::NbdDevice;
use crate::error::Result;
use crate::id::ContentName;
use crate::kernel::{Roots, udev_record};

impl NbdDevice {
    /// The names of its content as udev read them last: when it was connected, or when a
    /// process that had it open for writing closed it. `None` where udev has no record.
    ///
    /// # Errors
    /// Where the record cannot be read.
    pub fn content_by_udev(&self, roots: &Roots) -> Result<Option<Vec<ContentName>>> {
        let properties = udev_record::read_properties(roots, self.disk().devno())?;
        Ok(properties.map(|properties| content::names_by_udev(&properties)))
    }
}
