//! Compares the export of a server that came back with what it served before.

use std::fmt;

use super::block_size::BlockSizes;
use super::content::describe_content_names;
use super::export::{Export, ExportFlags};
use crate::id::ContentName;

/// One difference between an export and what it was before.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Difference {
    /// The export is smaller.
    Shrunk {
        /// The size before, in bytes.
        from: u64,
        /// The size now, in bytes.
        to: u64,
    },
    /// The export is larger.
    Grown {
        /// The size before, in bytes.
        from: u64,
        /// The size now, in bytes.
        to: u64,
    },
    /// The server refuses writes now.
    BecameReadOnly,
    /// The device is read-only and the server takes writes: the attach asked for that, or the
    /// server has changed.
    BecameWritable,
    /// The server's capabilities changed.
    Flags {
        /// What the server can no longer do.
        lost: ExportFlags,
        /// What the server can now do in addition.
        gained: ExportFlags,
    },
    /// The server accepts other request sizes.
    BlockSizes {
        /// The sizes before.
        from: BlockSizes,
        /// The sizes now.
        to: BlockSizes,
    },
    /// The content has other names, or has no name and other first bytes than before.
    Content {
        /// The names on the device when it was read last.
        from: Vec<ContentName>,
        /// The names on the server now; none if the export is blank.
        to: Vec<ContentName>,
        /// Whether it is certainly another volume. If not, a process may have written the
        /// content that is served now.
        is_proven: bool,
    },
}

impl Difference {
    /// Whether the kernel would continue with requests that the server now refuses or,
    /// worse, interprets differently. The kernel keeps the flags and the block sizes of
    /// the first connect (`NBD_CMD_RECONFIGURE` ignores the server's flags).
    ///
    /// Growth and additional capabilities are no obstacle. A lost
    /// [`CAN_MULTI_CONN`](ExportFlags::CAN_MULTI_CONN) is none for a device with one
    /// connection; with several connections, check [`Export::can_multi_conn`].
    #[must_use]
    pub fn prevents_reattach(&self) -> bool {
        match self {
            Self::Shrunk { .. } | Self::BecameReadOnly => true,
            Self::Grown { .. } | Self::BecameWritable => false,
            Self::Content { is_proven, .. } => *is_proven,
            Self::Flags { lost, .. } => lost.intersects(
                ExportFlags::SEND_FLUSH
                    | ExportFlags::SEND_FUA
                    | ExportFlags::SEND_TRIM
                    | ExportFlags::SEND_WRITE_ZEROES,
            ),
            Self::BlockSizes { from, to } => {
                to.minimum.max(512) > from.minimum.max(512) || to.maximum < from.maximum
            }
        }
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shrunk { from, to } => write!(f, "shrunk from {from} to {to} bytes"),
            Self::Grown { from, to } => write!(f, "grown from {from} to {to} bytes"),
            Self::BecameReadOnly => f.write_str("read-only now"),
            Self::BecameWritable => f.write_str("no write protection, unlike the device"),
            Self::Flags { lost, gained } => {
                let names = |flags: &ExportFlags| {
                    let names: Vec<_> = flags.iter_names().map(|(name, _)| name).collect();
                    if names.is_empty() {
                        "none".to_owned()
                    } else {
                        names.join(", ")
                    }
                };
                write!(f, "flags lost: {}; gained: {}", names(lost), names(gained))
            }
            Self::Content {
                from,
                to,
                is_proven,
            } => {
                let is_nameless = from.is_empty() && to.is_empty();
                let (from, to) = (describe_content_names(from), describe_content_names(to));
                let how = if *is_proven {
                    "another volume for certain; `heal SOURCE --accept-content` takes it"
                } else {
                    "another volume, or written meanwhile"
                };
                if is_nameless {
                    return write!(f, "other content, and neither has a name ({how})");
                }
                write!(f, "content with {to} instead of {from} ({how})")
            }
            Self::BlockSizes { from, to } => {
                write!(
                    f,
                    "block sizes {to} (minimum/preferred/maximum) instead of {from}"
                )
            }
        }
    }
}

impl Export {
    /// How this export, which a server serves now, differs from `before`. Empty if a
    /// reattach changes nothing. It does not compare names.
    #[must_use]
    pub fn differences_from(&self, before: &Self) -> Vec<Difference> {
        let mut differences = Vec::new();
        let (from, to) = (before.size, self.size);
        if to < from {
            differences.push(Difference::Shrunk { from, to });
        } else if to > from {
            differences.push(Difference::Grown { from, to });
        }
        match (before.read_only(), self.read_only()) {
            (false, true) => differences.push(Difference::BecameReadOnly),
            (true, false) => differences.push(Difference::BecameWritable),
            _ => {}
        }
        let lost = before.flags - self.flags - ExportFlags::READ_ONLY;
        let gained = self.flags - before.flags - ExportFlags::READ_ONLY;
        if lost != gained {
            differences.push(Difference::Flags { lost, gained });
        }
        let from = before.block_sizes.unwrap_or_default();
        let to = self.block_sizes.unwrap_or_default();
        if from != to {
            differences.push(Difference::BlockSizes { from, to });
        }
        differences
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn export(size: u64, flags: ExportFlags, sizes: Option<(u32, u32, u32)>) -> Export {
        let sizes = sizes.map(|(least, best, most)| BlockSizes::new(least, best, most).unwrap());
        let flags = flags | ExportFlags::HAS_FLAGS;
        Export::new("a", size, flags.bits(), sizes).unwrap()
    }

    const FLUSH: ExportFlags = ExportFlags::SEND_FLUSH;
    const GIB: u64 = 1 << 30;

    /// The differences, and whether one of them prevents the reattach.
    fn compare(before: &Export, now: &Export) -> (Vec<String>, bool) {
        let differences = now.differences_from(before);
        let prevented = differences.iter().any(Difference::prevents_reattach);
        (
            differences.iter().map(ToString::to_string).collect(),
            prevented,
        )
    }

    #[test]
    fn the_same_export_has_no_difference() {
        let before = export(GIB, FLUSH, None);
        assert_eq!(compare(&before, &before.clone()), (vec![], false));
        let said = export(GIB, FLUSH, Some((512, 4096, 32 << 20)));
        assert_eq!(compare(&before, &said), (vec![], false));
    }

    #[test]
    fn a_shrink_or_a_flip_to_read_only_prevents_the_reattach() {
        let before = export(GIB, FLUSH, None);
        let (said, prevented) = compare(&before, &export(GIB - 1, FLUSH, None));
        assert_eq!(said, ["shrunk from 1073741824 to 1073741823 bytes"]);
        assert!(prevented);
        let read_only = export(GIB, FLUSH | ExportFlags::READ_ONLY, None);
        assert_eq!(
            compare(&before, &read_only),
            (vec!["read-only now".to_owned()], true)
        );
        assert_eq!(
            compare(&read_only, &before),
            (
                vec!["no write protection, unlike the device".to_owned()],
                false
            )
        );
    }

    #[test]
    fn growth_and_what_the_server_can_do_beside_are_said_and_prevent_nothing() {
        let before = export(GIB, FLUSH, None);
        let now = export(GIB + 1, FLUSH | ExportFlags::SEND_TRIM, None);
        let (said, prevented) = compare(&before, &now);
        assert_eq!(
            said,
            [
                "grown from 1073741824 to 1073741825 bytes",
                "flags lost: none; gained: SEND_TRIM"
            ]
        );
        assert!(!prevented);
    }

    #[test]
    fn a_request_that_the_server_no_longer_takes_prevents_the_reattach() {
        let many = FLUSH | ExportFlags::CAN_MULTI_CONN | ExportFlags::ROTATIONAL;
        let before = export(GIB, many, Some((512, 4096, 1 << 20)));
        let after =
            |flags, least, most| compare(&before, &export(GIB, flags, Some((least, 4096, most)))).1;
        assert!(after(many - FLUSH, 512, 1 << 20));
        assert!(after(many, 1024, 1 << 20));
        assert!(after(many, 512, 1 << 19));
        assert!(!after(FLUSH, 1, 1 << 21));
        assert!(!after(many, 1, 1 << 20));
    }

    #[test]
    fn each_command_that_the_server_no_longer_knows_prevents_the_reattach() {
        let commands = [
            ExportFlags::SEND_FLUSH,
            ExportFlags::SEND_FUA,
            ExportFlags::SEND_TRIM,
            ExportFlags::SEND_WRITE_ZEROES,
        ];
        let all = commands
            .iter()
            .fold(ExportFlags::empty(), |all, one| all | *one);
        for lost in commands {
            let (said, prevented) =
                compare(&export(GIB, all, None), &export(GIB, all - lost, None));
            assert!(prevented, "{said:?}");
        }
    }

    #[test]
    fn a_flag_lost_and_another_gained_is_a_difference() {
        let before = export(GIB, FLUSH, None);
        let now = export(GIB, ExportFlags::SEND_FUA, None);
        assert_eq!(
            compare(&before, &now),
            (
                vec!["flags lost: SEND_FLUSH; gained: SEND_FUA".to_owned()],
                true
            )
        );
    }
}
