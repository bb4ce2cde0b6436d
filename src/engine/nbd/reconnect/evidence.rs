//! Compares what is known of a volume whose server is away with the content that a server serves
//! now. The guide's page on NBD has these rules as a table.
//!
//! The device itself cannot be read, since its reads wait for the server. This process read the
//! volume before the kernel had the connection, and its bytes stay the volume's until the kernel
//! has completed a write. udev read the device when the last process that had it open for writing
//! closed it. The names in a journal are those that a process with this journal read last.

use crate::id::ContentName;
use crate::nbd::{FirstBytes, KnownContent, content_names_differ};

/// What each reader of the volume has seen.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Evidence<'a> {
    /// What this process read, with the device's write counter at that time.
    pub(super) by_us: Option<&'a KnownContent>,
    /// The write counter now; `None` if the kernel does not count.
    pub(super) written: Option<u64>,
    /// The names in udev's record of the device.
    pub(super) by_udev: Option<&'a [ContentName]>,
    /// The names that the volume had when they were last written down.
    pub(super) by_journal: Option<&'a [ContentName]>,
}

/// What the evidence says about other content.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict<'a> {
    /// No evidence contradicts it.
    Same,
    /// The device had these names, and a process may have written others since, or the
    /// evidence contradicts itself.
    Doubt { from: &'a [ContentName] },
    /// The device had these names. It is another volume unless a process is writing.
    Other {
        from: &'a [ContentName],
        by: EvidenceSource,
    },
}

/// The evidence that contradicts the content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EvidenceSource {
    /// The names that this process read.
    OurNames,
    /// The bytes that this process read; neither content has a name.
    OurBytes,
    /// The names in udev's record.
    Udev,
}

impl<'a> Evidence<'a> {
    /// Whether the volume is known to have had a name.
    pub(super) fn has_a_name(&self) -> bool {
        self.readings().any(|names| !names.is_empty())
    }

    pub(super) fn compare(&self, now: &FirstBytes) -> Verdict<'a> {
        let counted = |known: &&KnownContent| known.written.is_some();
        let ours = self.by_us.filter(counted);
        let ours = ours.filter(|known| known.written == self.written);
        if ours.is_some_and(|known| known.first == *now) {
            return Verdict::Same;
        }
        let by = if now.names.is_empty() && ours.is_some_and(|known| known.first.names.is_empty()) {
            EvidenceSource::OurBytes
        } else {
            EvidenceSource::OurNames
        };
        let ours = ours.map(|known| (&*known.first.names, by));
        // No name is no evidence: there are formats that udev does not tell apart.
        let udevs = self.by_udev.filter(|names| !names.is_empty());
        let udevs = udevs.map(|names| (names, EvidenceSource::Udev));
        let keeps_one = |(names, _): &(&[ContentName], EvidenceSource)| {
            !names.is_empty() && !content_names_differ(&now.names, names)
        };
        let (agree, contradict): (Vec<_>, Vec<_>) =
            [udevs, ours].into_iter().flatten().partition(keeps_one);
        match contradict.first() {
            Some(&(from, by)) if agree.is_empty() => Verdict::Other { from, by },
            Some(&(from, _)) => Verdict::Doubt { from },
            None if agree.is_empty() => self.compare_old_names(&now.names),
            None => Verdict::Same,
        }
    }

    /// The verdict where each reading may be older than the last write.
    fn compare_old_names(&self, now: &[ContentName]) -> Verdict<'a> {
        let agrees = |names: &[ContentName]| match names {
            [] => now.is_empty(),
            names => !content_names_differ(now, names),
        };
        let mut named = self.readings().filter(|names| !names.is_empty());
        match named.next().or_else(|| self.readings().next()) {
            Some(from) if !self.readings().any(agrees) => Verdict::Doubt { from },
            _ => Verdict::Same,
        }
    }

    /// The names of each reading.
    fn readings(&self) -> impl Iterator<Item = &'a [ContentName]> + use<'a> {
        let by_us = self.by_us.map(|known| &*known.first.names);
        let all = [by_us, self.by_udev, self.by_journal];
        all.into_iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The names of these kinds; a kind before `'` has another UUID.
    fn names(text: &str) -> Vec<ContentName> {
        let name = |kind: &str| match kind.strip_suffix('\'') {
            Some(kind) => format!("{kind}.1a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9"),
            None => format!("{kind}.0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9"),
        };
        let names = text.split_whitespace();
        names.map(|kind| name(kind).parse().unwrap()).collect()
    }

    /// First bytes with these names, and with `variant` in a byte that names nothing.
    fn first(text: &str, variant: u8) -> FirstBytes {
        FirstBytes {
            names: names(text),
            ..FirstBytes::of(&[variant; 4096])
        }
    }

    fn known(text: &str, written: Option<u64>) -> KnownContent {
        let first = first(text, 0);
        KnownContent { first, written }
    }

    /// The verdict in words about content with the names `now` and other bytes than before.
    fn verdict_of(evidence: Evidence<'_>, now: &str) -> String {
        let spell = |names: &[ContentName]| {
            let kinds = names.iter().map(ToString::to_string);
            let kinds = kinds.map(|name| name.split('.').next().unwrap().to_owned());
            kinds.collect::<Vec<_>>().join(" ")
        };
        match evidence.compare(&first(now, 1)) {
            Verdict::Same => "same".to_owned(),
            Verdict::Doubt { from } => format!("doubt, had {}", spell(from)),
            Verdict::Other { from, by } => format!("not {} by {by:?}", spell(from)),
        }
    }

    #[test]
    fn while_nothing_was_written_the_bytes_that_we_read_are_the_volumes() {
        let (named, unnamed) = (known("fs", Some(7)), known("", Some(7)));
        let ours = |by_us| Evidence {
            by_us: Some(by_us),
            written: Some(7),
            ..Evidence::default()
        };
        let of_others = names("luks");
        for (evidence, now) in [(ours(&named), "fs"), (ours(&unnamed), "")] {
            let evidence = Evidence {
                by_udev: Some(&of_others),
                ..evidence
            };
            assert_eq!(evidence.compare(&first(now, 0)), Verdict::Same);
        }
        for (by_us, now, expected) in [
            (&named, "fs", "same"),
            (&named, "gpt fs", "same"),
            (&named, "luks", "not fs by OurNames"),
            (&named, "", "not fs by OurNames"),
            (&unnamed, "fs", "not  by OurNames"),
            (&unnamed, "", "not  by OurBytes"),
        ] {
            assert_eq!(verdict_of(ours(by_us), now), expected, "{now}");
        }
    }

    #[test]
    fn after_a_write_and_where_the_kernel_does_not_count_udevs_names_alone_prove_something() {
        let by_us = known("fs", Some(7));
        let uncounted = known("fs", None);
        let (luks, none) = (names("luks"), names(""));
        for (by_us, written) in [
            (&by_us, Some(8)),
            (&by_us, None),
            (&uncounted, None),
            (&uncounted, Some(7)),
        ] {
            let evidence = |by_udev| Evidence {
                by_us: Some(by_us),
                written,
                by_udev,
                ..Evidence::default()
            };
            for (by_udev, now, expected) in [
                (Some(&*luks), "luks", "same"),
                (Some(&luks), "fs", "not luks by Udev"),
                (Some(&luks), "", "not luks by Udev"),
                (Some(&none), "luks", "doubt, had fs"),
                (Some(&none), "fs", "same"),
                (None, "luks", "doubt, had fs"),
                (None, "fs", "same"),
            ] {
                assert_eq!(
                    verdict_of(evidence(by_udev), now),
                    expected,
                    "{by_us:?} {now}"
                );
            }
        }
    }

    #[test]
    fn evidence_that_contradicts_itself_proves_another_volume_only_where_it_has_none_of_the_names()
    {
        let (by_us, by_udev) = (known("fs", Some(7)), names("luks"));
        let evidence = Evidence {
            by_us: Some(&by_us),
            written: Some(7),
            by_udev: Some(&by_udev),
            ..Evidence::default()
        };
        for (now, expected) in [
            ("fs", "doubt, had luks"),
            ("luks", "doubt, had fs"),
            ("fs luks", "same"),
            ("gpt", "not luks by Udev"),
            ("", "not luks by Udev"),
        ] {
            assert_eq!(verdict_of(evidence, now), expected, "{now}");
        }
    }

    #[test]
    fn names_of_a_journal_and_no_name_by_udev_leave_doubt_about_other_names() {
        let (fs, none) = (names("fs"), names(""));
        let evidence = |by_udev, by_journal| Evidence {
            by_udev,
            by_journal,
            written: Some(7),
            ..Evidence::default()
        };
        for (by_udev, by_journal, now, expected) in [
            (None, None, "luks", "same"),
            (None, Some(&*fs), "fs", "same"),
            (None, Some(&fs), "luks", "doubt, had fs"),
            (None, Some(&fs), "", "doubt, had fs"),
            (None, Some(&none), "luks", "doubt, had "),
            (Some(&*none), None, "luks", "doubt, had "),
            (Some(&none), None, "", "same"),
            (Some(&none), Some(&fs), "luks", "doubt, had fs"),
            (Some(&none), Some(&fs), "fs", "same"),
            // udev read the device later than the journal was written.
            (Some(&names("luks")), Some(&fs), "fs", "not luks by Udev"),
        ] {
            assert_eq!(
                verdict_of(evidence(by_udev, by_journal), now),
                expected,
                "{now}"
            );
        }
    }

    #[test]
    fn another_device_of_the_same_btrfs_contradicts_each_evidence_that_knows_the_device() {
        let (by_us, device, fs) = (known("fs btrfs", Some(7)), names("fs btrfs"), names("fs"));
        let ours = Evidence {
            by_us: Some(&by_us),
            written: Some(7),
            ..Evidence::default()
        };
        let of_others = |by_udev, by_journal| Evidence {
            by_udev,
            by_journal,
            ..Evidence::default()
        };
        for (evidence, expected) in [
            (ours, "not fs btrfs by OurNames"),
            (of_others(Some(&*device), None), "not fs btrfs by Udev"),
            (of_others(None, Some(&*device)), "doubt, had fs btrfs"),
            (of_others(None, Some(&fs)), "same"),
        ] {
            assert_eq!(verdict_of(evidence, "fs btrfs"), "same");
            assert_eq!(verdict_of(evidence, "fs btrfs'"), expected);
        }
    }
}
