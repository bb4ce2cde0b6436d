//! Checks whether a server that came back serves the volume that the device had.
//!
//! The device itself cannot be read, since its reads wait for the server. Two programs have
//! read it before. This library did, before the kernel had the connection, and what it read
//! is true as long as the kernel has completed no write since. udev did, when the last
//! process that had the device open for writing closed it. Other content than theirs is
//! certainly another volume if nobody can have written it through the device: no process has
//! the device open for writing, no other device passes writes on to it, and udev does not
//! read it now. In doubt the server is accepted, so that formatting a volume never makes its
//! heal refused.

use super::NbdReconnect;
use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::usage::{Extent, Holder};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::ContentName;
use crate::nbd::{Content, Difference, KnownContent, Link, is_other_content, spelt_content};
use crate::uevent::Mode;

/// What the device held when it was read last.
#[derive(Debug, PartialEq, Eq)]
struct LastHeld<'a> {
    names: &'a [ContentName],
    /// Which program read the names; `None` if something was written since then that no
    /// program has read.
    by: Option<Witness>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Witness {
    /// Nothing was written since this library read it.
    Us,
    Udev,
}

impl LastHeld<'_> {
    fn of<'a>(
        by_us: Option<&'a KnownContent>,
        written: u64,
        by_udev: Option<&'a [ContentName]>,
    ) -> LastHeld<'a> {
        let (names, by) = match (by_us, by_udev) {
            (Some(known), _) if known.written == written => (&*known.names, Some(Witness::Us)),
            (_, Some(names)) => (names, Some(Witness::Udev)),
            (Some(known), None) => (&*known.names, None),
            (None, None) => (&[][..], None),
        };
        LastHeld { names, by }
    }
}

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
        let held = LastHeld::of(by_us.as_ref(), self.device.written()?, by_udev.as_deref());
        let now = match now {
            Content::Named(names) => names,
            Content::Unread(_) if held.names.is_empty() && self.rule.expected.is_none() => {
                return Ok(None);
            }
            Content::Unread(error) => return Err(self.unread(*error)),
        };
        let difference = |from: &[ContentName], is_proven| Difference::Content {
            from: from.to_vec(),
            to: now.clone(),
            is_proven,
        };
        if let Some(expected) = self
            .rule
            .expected
            .as_ref()
            .filter(|name| !now.contains(name))
        {
            return Ok(Some(difference(std::slice::from_ref(expected), true)));
        }
        // A write that udev has seen may not have reached the server.
        let by_us = by_us.iter().flat_map(|known| &known.names);
        let had_once = by_us.into_iter().any(|name| now.contains(name));
        if had_once || !is_other_content(now, held.names) {
            return Ok(None);
        }
        let is_proven = match held.by {
            Some(witness) => self.nobody_writes(engine, witness, held.names, deadline)?,
            None => false,
        };
        Ok(Some(difference(held.names, is_proven)))
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
            spelt_content(names)
        );
        let error = Error::new(ErrorKind::IdentityMismatch, message).at(Stage::Identify);
        Err(error.with_found(names))
    }

    fn known_content(&self, engine: &Engine) -> Option<KnownContent> {
        let own = |link: &&Link| link.backend == self.backend;
        let links = engine.links_beside(&self.device);
        let by_link = links.get(&self.index()).filter(own);
        by_link.and_then(|link| link.content.clone())
    }

    /// Whether no process can have written other names through the device since these were
    /// read.
    fn nobody_writes(
        &self,
        engine: &Engine,
        witness: Witness,
        names: &[ContentName],
        deadline: Deadline,
    ) -> Result<bool> {
        let disk = self.device.disk();
        let users = engine.users_of(disk, Extent::All, deadline)?;
        let may_write = |user: &Holder| {
            // What udev reads now is not in its record yet.
            (witness == Witness::Udev && user.is_of_udev())
                || matches!(
                    user,
                    Holder::Open { writes: true, .. }
                        | Holder::Mapped { .. }
                        | Holder::Registered { .. }
                        | Holder::Loop { .. }
                        | Holder::Export { .. }
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
        // No tool that formats can open the device while it is claimed.
        if users.found.iter().any(claims) {
            return Ok(true);
        }
        Ok(users.not_looked_at.is_empty() && !self.device.has_writes_in_flight()?)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> Vec<ContentName> {
        let name = |kind: &str| format!("{kind}.0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9");
        let names = text.split_whitespace();
        names.map(|kind| name(kind).parse().unwrap()).collect()
    }

    fn known(text: &str, written: u64) -> KnownContent {
        let content = Content::Named(names(text));
        content.known(written).unwrap()
    }

    #[test]
    fn our_own_word_counts_until_something_is_written_and_then_udevs() {
        let by_us = known("fs", 7);
        let by_udev = names("luks");
        let held = |known, written, udev| {
            let held = LastHeld::of(known, written, udev);
            (held.names.to_vec(), held.by)
        };
        let udev = Some(&*by_udev);
        assert_eq!(
            held(Some(&by_us), 7, udev),
            (names("fs"), Some(Witness::Us))
        );
        assert_eq!(
            held(Some(&by_us), 8, udev),
            (names("luks"), Some(Witness::Udev))
        );
        assert_eq!(held(None, 8, udev), (names("luks"), Some(Witness::Udev)));
        assert_eq!(held(Some(&by_us), 8, None), (names("fs"), None));
        assert_eq!(held(None, 8, None), (names(""), None));
    }
}
