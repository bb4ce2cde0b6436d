//! Checks whether a server that came back serves the volume that the device had.
//!
//! [The evidence](super::evidence) says what the volume held. Other content is certainly
//! another volume if nobody can have written it through the device: no process has the device
//! open for writing, no other device passes writes on to it, and udev does not read it now.
//! In doubt the server is accepted, so that formatting a volume never makes its heal refused.

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::nbd::known::current_links;
use crate::engine::nbd::reconnect::NbdReconnect;
use crate::engine::nbd::reconnect::evidence::{Evidence, EvidenceSource, Verdict};
use crate::engine::usage::{Extent, Holder, users_of};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::ContentName;
use crate::kernel::sysfs;
use crate::nbd::{Content, Difference, KnownContent, Link, QueueFacts, describe_content_names};
use crate::uevent::Mode;

impl NbdReconnect {
    /// How the content that a server serves differs from that of the volume; `None` if it
    /// does not.
    ///
    /// # Errors
    /// `NotReady` at stage `identify` if the server answers the read with an error and the
    /// volume has a name; or where sysfs or `/proc` cannot be read.
    pub(super) fn other_content(
        &self,
        engine: &Engine,
        now: &Content,
        facts: &QueueFacts,
        deadline: Deadline,
    ) -> Result<Option<Difference>> {
        if self.rule.accepts_any {
            return Ok(None);
        }
        let by_us = self.known_content(engine);
        let by_udev = match engine.hub().mode() {
            Mode::Udev => self.device.content_by_udev(engine.roots())?,
            _ => None,
        };
        let evidence = Evidence {
            by_us: by_us.as_ref(),
            written: self.device.written(facts.counts_requests)?,
            by_udev: by_udev.as_deref(),
            by_journal: self.rule.last_known.as_deref(),
        };
        let now = match now {
            Content::Read(first) => first,
            Content::Unread(_) if !evidence.has_a_name() && self.rule.expected.is_none() => {
                return Ok(None);
            }
            Content::Unread(error) => return Err(self.unread(*error)),
        };
        let difference = |from: &[ContentName], is_proven| Difference::Content {
            from: from.to_vec(),
            to: now.names.clone(),
            is_proven,
        };
        if let Some(expected) = self
            .rule
            .expected
            .as_ref()
            .filter(|name| !now.names.contains(name))
        {
            return Ok(Some(difference(std::slice::from_ref(expected), true)));
        }
        Ok(match evidence.compare(now) {
            Verdict::Same => None,
            Verdict::Doubt { from } => Some(difference(from, false)),
            Verdict::Other { from, by } => {
                let is_proven = self.no_process_can_write(engine, by, from, facts, deadline)?;
                Some(difference(from, is_proven))
            }
        })
    }

    /// Logs that the device has other content than before, and makes udev read it. udev's record is
    /// evidence at the next heal, and udev itself reads a device only when a writer closes it
    /// (`Documentation/ABI/testing/sysfs-uevent`).
    pub(super) fn note_other_content(&self, engine: &Engine, differences: &[Difference]) {
        let mut may_be_other = self.rule.accepts_any;
        for difference in differences {
            if let Difference::Content { .. } = difference {
                tracing::warn!(index = %self.index(), %difference, "healed");
                may_be_other = true;
            }
        }
        if !may_be_other || engine.hub().mode() != Mode::Udev {
            return;
        }
        let event = self.device.disk().dir().join("uevent");
        if let Err(error) = sysfs::write(&engine.roots().devices, &event, "change") {
            tracing::warn!(%error, index = %self.index(), "udev's record has the earlier content");
        }
    }

    /// # Errors
    /// `IdentityMismatch` if these names lack the expected one.
    pub(super) fn require_expected(&self, names: &[ContentName]) -> Result<()> {
        let expected = self.rule.expected.as_ref();
        let Some(expected) = expected.filter(|name| !names.contains(name)) else {
            return Ok(());
        };
        let message = format!(
            "the content of nbd{} has {}, expected {expected}",
            self.index(),
            describe_content_names(names)
        );
        let error = Error::new(ErrorKind::IdentityMismatch, message).at(Stage::Identify);
        Err(error.with_found(names))
    }

    fn known_content(&self, engine: &Engine) -> Option<KnownContent> {
        let own = |link: &&Link| link.backend == self.backend;
        let links = current_links(engine, &self.device);
        let by_link = links.get(&self.index()).filter(own);
        by_link.and_then(|link| link.content.clone())
    }

    /// Whether no process can have written other content through the device since these names
    /// were read.
    fn no_process_can_write(
        &self,
        engine: &Engine,
        source: EvidenceSource,
        names: &[ContentName],
        facts: &QueueFacts,
        deadline: Deadline,
    ) -> Result<bool> {
        let disk = self.device.disk();
        let users = users_of(engine, disk, Extent::All, deadline)?;
        let may_write = |user: &Holder| {
            // What udev reads now is not in its record yet.
            (source == EvidenceSource::Udev && user.is_of_udev())
                || matches!(
                    user,
                    Holder::Open { writes: true, .. }
                        | Holder::Mapped { .. }
                        | Holder::Registered { .. }
                        | Holder::Loop { .. }
                        | Holder::Export { .. }
                        | Holder::Kernel { .. }
                )
        };
        if users.found.iter().any(may_write) {
            return Ok(false);
        }
        // A device that is stacked on LUKS or LVM never writes their header. A process that
        // writes to another kind of stacked device can reach the names.
        if !disk.holders()?.is_empty()
            && !names.iter().any(ContentName::is_hidden_by_stacked_device)
        {
            return Ok(false);
        }
        let claims = |user: &Holder| {
            matches!(
                user,
                Holder::Mount { .. } | Holder::Stacked { .. } | Holder::Swap { .. }
            )
        };
        // No tool that formats can open the device while it is claimed. What claims it changes
        // bytes, but no name.
        if source != EvidenceSource::OurBytes && users.found.iter().any(claims) {
            return Ok(true);
        }
        let counts_requests = facts.counts_requests;
        let may_write = self.device.may_have_writes_in_flight(counts_requests)?;
        Ok(users.not_looked_at.is_empty() && !may_write)
    }

    fn unread(&self, error: u32) -> Error {
        let message = format!(
            "the server of nbd{} answers a read of the first bytes with error {error}: it is not \
             known to serve the volume that the device had",
            self.index()
        );
        Error::new(ErrorKind::NotReady, message).at(Stage::Identify)
    }
}
