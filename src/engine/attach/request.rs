//! The request of an attach.

use std::fmt;
use std::sync::Arc;

use crate::engine::attach::nbd_options::NbdOptions;
use crate::engine::timing::StageObserver;
use crate::engine::unit::place::PathPlace;
use crate::error::Result;
use crate::id::{ContentName, DevNo, DiskSeq, Source, Wwid};
use crate::iscsi::SessionOptions;
use crate::scsi::Identity;

/// What to attach, and what the caller expects of it.
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
    /// An interrupted attach of the same volume may have left a device, which this attach
    /// resumes.
    pub(in crate::engine) may_resume: bool,
    /// The journal had the volume, from this source, before this attach.
    pub(in crate::engine) is_recorded: bool,
    /// The device that the last attach of the volume returned, as the journal recorded it.
    pub(in crate::engine) last_device: Option<(DevNo, Option<DiskSeq>)>,
    /// The content that the journal recorded for the volume; `None` where that is not known.
    pub(in crate::engine) known_content: Option<Vec<ContentName>>,
    pub(super) observer: Option<StageObserver>,
}

impl AttachRequest {
    /// An attach of `source` that expects no particular unit.
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
            may_resume: false,
            is_recorded: false,
            last_device: None,
            known_content: None,
            observer: None,
        }
    }

    /// Attaches only if the unit itself reports this name. For SCSI: an NBD server knows no such
    /// names, and [`NbdOptions::expect`] names the content of its volume.
    #[must_use]
    pub fn expect(mut self, wwid: Wwid) -> Self {
        self.expected = Some(wwid);
        self
    }

    /// Adds another source of the same unit, for the further paths of an attach where one source
    /// does not name them all (an array with one target name per port). For SCSI. Paths whose
    /// names agree and are not [unique](Wwid::is_unique) count as one unit, unless they lead to
    /// two iSCSI targets.
    #[must_use]
    pub fn path(mut self, source: impl Into<Source>) -> Self {
        self.more.push(source.into());
        self
    }

    /// How many paths must lead to a SCSI unit for the attach to succeed; 1 by default.
    /// [`Unit::Scsi`](crate::engine::Unit::Scsi) lists the missing ones with the reasons.
    #[must_use]
    pub fn min_paths(mut self, count: usize) -> Self {
        self.min_paths = count;
        self
    }

    /// Whether the attach returns a multipath map.
    #[must_use]
    pub fn multipath(mut self, multipath: Multipath) -> Self {
        self.multipath = multipath;
        self
    }

    /// Whether a journal records the volume and its source.
    pub(in crate::engine) fn is_in_a_journal(&self) -> bool {
        self.claim.is_some()
    }

    pub(in crate::engine) fn sources(&self) -> impl Iterator<Item = &Source> {
        std::iter::once(&self.source).chain(&self.more)
    }

    /// How to attach an NBD source; other sources ignore it.
    #[must_use]
    pub fn nbd(mut self, options: NbdOptions) -> Self {
        self.nbd = options;
        self
    }

    /// Logs in where no session leads to an iSCSI source: through all of its portals at once,
    /// without a daemon. The attach uses an existing session of the same initiator, whether lunbd
    /// or iscsid made it. A session that the attach makes stays until the last device on it is
    /// detached. For a volume of a journal the CHAP secret must be [where the next process finds
    /// it](SessionOptions::credentials_from).
    #[must_use]
    pub fn log_in(mut self, options: SessionOptions) -> Self {
        self.log_in = Some(options);
        self
    }

    /// Calls `observer` for each stage.
    #[must_use]
    pub fn observe(mut self, observer: StageObserver) -> Self {
        self.observer = Some(observer);
        self
    }
}

/// Called with the names of a SCSI unit before the attach returns it. If the call refuses the unit,
/// the attach removes the devices that it added.
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
/// With its own defaults (`find_multipaths strict`) multipathd maps only a unit that it has mapped
/// before or is told to map. The attach tells it (`add map`) where the caller wants a map: with
/// [`Multipath::Require`], and with [`Multipath::Prefer`] where the attach names two paths or
/// more. multipathd then writes the unit's name into `/etc/multipath/wwids`, as it does for every
/// map that it makes, and maps the unit by itself whenever it comes again; `multipath -w` removes
/// the name. Its blacklists always apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum Multipath {
    /// Waits until the map is there and holds every path of the attach. Fails at once where
    /// multipathd answers that it makes no map.
    Require,
    /// Uses the map if multipathd makes one of these paths, otherwise the path with the best ALUA
    /// access state. Of equal paths it uses the first; for a volume of a journal, the one whose
    /// device the volume has already. If several paths were named,
    /// [`Unit::Scsi`](crate::engine::Unit::Scsi) says why there is no map. A single path is mapped
    /// only where multipathd maps it by itself.
    #[default]
    Prefer,
    /// Asks no multipathd and uses the path with the best ALUA access state. Of equal paths it
    /// uses the same one as [`Prefer`](Self::Prefer).
    Off,
}
