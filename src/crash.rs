//! The crash points: places where a test can end the process or the machine. They
//! lie before and after each act on the kernel, and on each file that must outlive
//! a crash.
//!
//! `crash_point!(Name);` expands to nothing without the feature `crash-points`, which
//! only the crash sweeps of the tests turn on. All points are listed here, so that
//! the sweep can count them and prove that it reached each of them.

/// Ends the process here if a test has asked for it.
macro_rules! crash_point {
    ($point:ident) => {
        #[cfg(feature = "crash-points")]
        $crate::crash::Point::$point.reach();
    };
}
pub(crate) use crash_point;

#[cfg(feature = "crash-points")]
mod end;

#[cfg(feature = "crash-points")]
macro_rules! points {
    ($($point:ident $name:literal,)*) => {
        /// A place in the code; its name says the kind of work and the step.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        #[expect(missing_docs, reason = "each has its name beside it in the list")]
        pub enum Point {
            $($point,)*
        }

        impl Point {
            /// Every point.
            pub const ALL: &'static [Self] = &[$(Self::$point,)*];

            /// The point's name, for example `journal.synced`.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$point => $name,)*
                }
            }
        }
    };
}

#[cfg(feature = "crash-points")]
points! {
    // Opening the journal.
    JournalToMake "journal.to-make",
    JournalMade "journal.made",
    JournalLocked "journal.locked",
    JournalToDropUnfinished "journal.to-drop-unfinished",
    JournalUnfinishedDropped "journal.unfinished-dropped",
    JournalToSetAside "journal.to-set-aside",
    JournalSetAside "journal.set-aside",
    // Writing a record: create a file beside it, sync the file, rename it, sync
    // the directory.
    JournalToWrite "journal.to-write",
    JournalCreated "journal.created",
    JournalWritten "journal.written",
    JournalSynced "journal.synced",
    JournalRenamed "journal.renamed",
    JournalKept "journal.kept",
    JournalToRemove "journal.to-remove",
    JournalRemoved "journal.removed",
    JournalForgotten "journal.forgotten",
    // The lock on a device or a unit.
    DeviceLockToTake "device-lock.to-take",
    DeviceLockCreated "device-lock.created",
    DeviceLockTaken "device-lock.taken",
    DeviceLockToDrop "device-lock.to-drop",
    DeviceLockDropped "device-lock.dropped",
    // The mark of a failed flush.
    FailedFlushToWrite "failed-flush.to-write",
    FailedFlushWritten "failed-flush.written",
    FailedFlushToClear "failed-flush.to-clear",
    FailedFlushCleared "failed-flush.cleared",
    FailedFlushToSweep "failed-flush.to-sweep",
    FailedFlushSwept "failed-flush.swept",
    // A block device of any kind.
    ClaimToTake "block.to-claim",
    ClaimTaken "block.claimed",
    FlushToBegin "block.to-flush",
    FlushSynced "block.synced",
    BarrierToSend "block.to-send-barrier",
    BarrierSent "block.barrier-sent",
    // SCSI.
    ScanToWrite "scsi.to-scan",
    ScanWritten "scsi.scanned",
    RescanToWrite "scsi.to-rescan",
    RescanWritten "scsi.rescanned",
    DeleteToWrite "scsi.to-delete",
    DeleteWritten "scsi.deleted",
    // Multipath.
    MultipathdToTell "multipath.to-tell",
    MultipathdTold "multipath.told",
    DmToRemove "multipath.to-remove",
    DmRemoved "multipath.removed",
    DmToLoad "multipath.to-load",
    DmLoaded "multipath.loaded",
    DmToSwap "multipath.to-swap",
    DmSwapped "multipath.swapped",
    DmToSend "multipath.to-send-message",
    DmSent "multipath.message-sent",
    // NBD.
    NbdToConnect "nbd.to-connect",
    NbdConnected "nbd.connected",
    NbdToLimit "nbd.to-limit",
    NbdLimited "nbd.limited",
    NbdToEndLink "nbd.to-end-link",
    NbdLinkEnded "nbd.link-ended",
    NbdToReconfigure "nbd.to-reconfigure",
    NbdReconfigured "nbd.reconfigured",
    NbdToDisconnect "nbd.to-disconnect",
    NbdDisconnected "nbd.disconnected",
    // iSCSI: the login on the engine's own socket, then the calls that hand it to
    // the kernel.
    IscsiToDial "iscsi.to-dial",
    IscsiDialled "iscsi.dialled",
    IscsiLoggedIn "iscsi.logged-in",
    IscsiToCreateSession "iscsi.to-create-session",
    IscsiSessionCreated "iscsi.session-created",
    IscsiToCreateConnection "iscsi.to-create-connection",
    IscsiConnectionCreated "iscsi.connection-created",
    IscsiToBind "iscsi.to-bind",
    IscsiBound "iscsi.bound",
    IscsiToSet "iscsi.to-set",
    IscsiSet "iscsi.set",
    IscsiToStart "iscsi.to-start",
    IscsiStarted "iscsi.started",
    // Setting the devices running that the kernel set offline while the session
    // was lost.
    DeviceToRun "iscsi.to-run-device",
    DeviceRuns "iscsi.device-runs",
    // iSCSI: the logout. Recovery also stops a lost connection and sends a login
    // request on it.
    IscsiToUnbind "iscsi.to-unbind",
    IscsiUnbound "iscsi.unbound",
    IscsiToSend "iscsi.to-send",
    IscsiSent "iscsi.sent",
    IscsiToStop "iscsi.to-stop",
    IscsiStopped "iscsi.stopped",
    IscsiToDestroyConnection "iscsi.to-destroy-connection",
    IscsiConnectionDestroyed "iscsi.connection-destroyed",
    IscsiToDestroySession "iscsi.to-destroy-session",
    IscsiSessionDestroyed "iscsi.session-destroyed",
}
