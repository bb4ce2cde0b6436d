//! What an attach is asked.

use std::fmt;
use std::sync::Arc;

use crate::engine::attach::nbd_options::NbdOptions;
use crate::engine::timing::StageObserver;
use crate::engine::unit::place::PathPlace;
use crate::error::Result;
use crate::id::{ContentName, Source, Wwid};
use crate::iscsi::SessionOptions;
use crate::scsi::Identity;

/// What to attach, and what to expect.
#[derive(Debug, Clone)]
pub struct AttachRequest {
    pub(in crate::engine) source: Source,
    pub(in crate::engine) more: Vec<Source>,
    pub(in crate::engine) min_paths: usize,
    pub(in crate::engine) multipath: Multipath,
    pub(in crate::engine) expected: Option<Wwid>,
    pub(in crate::engine) nbd: NbdOptions,
    pub(in crate::engine) log_in: Option<SessionOptions>,
    pub(in crate::engine) claim: Option<UnitClaim>,
    /// What stands may be left of an attach that was not to see its end.
    pub(in crate::engine) finishing: bool,
    /// What the volume held by the journal's word; `None` where that is not known.
    pub(in crate::engine) known_content: Option<Vec<ContentName>>,
    pub(super) observer: Option<StageObserver>,
}

impl AttachRequest {
    /// An attach of `source`, whatever it turns out to be.
    pub fn new(source: impl Into<Source>) -> Self {
        Self {
            source: source.into(),
            more: Vec::new(),
            min_paths: 1,
            multipath: Multipath::default(),
            expected: None,
            nbd: NbdOptions::default(),
            log_in: None,
            claim: None,
            finishing: false,
            known_content: None,
            observer: None,
        }
    }

    /// Attaches only if the unit itself says that this is one of its names.
    /// For SCSI: an NBD server knows no such names, and the content of its volume has
    /// names of [its own](NbdOptions::expect).
    #[must_use]
    pub fn expect(mut self, wwid: Wwid) -> Self {
        self.expected = Some(wwid);
        self
    }

    /// Another source of the same unit: further paths of one attach, where one
    /// source does not name them all (an array with a target name a port). For SCSI. Paths
    /// whose names agree and are not [unique](Wwid::is_unique) are taken for one unit,
    /// unless they lead to two iSCSI targets.
    #[must_use]
    pub fn path(mut self, source: impl Into<Source>) -> Self {
        self.more.push(source.into());
        self
    }

    /// How many paths must lead to a SCSI unit for the attach to succeed; 1 by
    /// default. Those that are missing are in [`Unit::Scsi`](crate::engine::Unit::Scsi) with why.
    #[must_use]
    pub fn min_paths(mut self, count: usize) -> Self {
        self.min_paths = count;
        self
    }

    /// Whether the device that is handed out is a multipath map.
    #[must_use]
    pub fn multipath(mut self, multipath: Multipath) -> Self {
        self.multipath = multipath;
        self
    }

    /// Whether the volume and its source are written down in a journal.
    pub(in crate::engine) fn is_in_a_journal(&self) -> bool {
        self.claim.is_some()
    }

    pub(in crate::engine) fn sources(&self) -> impl Iterator<Item = &Source> {
        std::iter::once(&self.source).chain(&self.more)
    }

    /// How an NBD source is attached; other sources have no use for it.
    #[must_use]
    pub fn nbd(mut self, options: NbdOptions) -> Self {
        self.nbd = options;
        self
    }

    /// Logs in where no session leads to an iSCSI source: through all of its
    /// portals at once, without a daemon. A session that is there is used, ours or
    /// the daemon's, where it is of the same initiator. One that this makes stands
    /// until the last device on it is detached. For a volume of a journal the CHAP
    /// secret must be [where the next process finds it](SessionOptions::credentials_from).
    #[must_use]
    pub fn log_in(mut self, options: SessionOptions) -> Self {
        self.log_in = Some(options);
        self
    }

    /// Has `observer` told each stage.
    #[must_use]
    pub fn observe(mut self, observer: StageObserver) -> Self {
        self.observer = Some(observer);
        self
    }
}

/// Asked of a SCSI unit as soon as it has said who it is, and before it is
/// handed out: a refusal takes down again what the attach brought.
#[derive(Clone)]
pub(in crate::engine) struct UnitClaim(pub(in crate::engine) Arc<ClaimUnit>);

type ClaimUnit = dyn Fn(&Identity, &[PathPlace]) -> Result<()> + Send + Sync;

impl fmt::Debug for UnitClaim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UnitClaim")
    }
}

/// Whether a SCSI unit is used through a multipath map.
///
/// multipathd with its own defaults (`find_multipaths strict`) makes a map only of a
/// unit that it has mapped before or is told to map. It is told (`add map`) where the
/// caller wants a map: with [`Multipath::Require`], and with [`Multipath::Prefer`] where
/// the attach names two paths or more. multipathd then writes the unit's name into its
/// file, `/etc/multipath/wwids`, as it does for every map that it makes, and maps the
/// unit by itself whenever it comes again; `multipath -w` takes the name out. Its
/// blacklists always count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum Multipath {
    /// The map must be there and hold every path of the attach: waits for it. Fails at
    /// once where multipathd says that it makes none.
    Require,
    /// The map where multipathd makes one of these paths, else the first path, and
    /// [`Unit::Scsi`](crate::engine::Unit::Scsi) says why there is no map. One path alone is mapped only where
    /// multipathd maps it by itself.
    #[default]
    Prefer,
    /// The first path; multipathd is not asked.
    Off,
}
