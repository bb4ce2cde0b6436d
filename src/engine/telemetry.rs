//! The measurements, for a recorder of the `metrics` facade that the application has installed
//! (feature `metrics`); without the feature nothing is measured.

use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind, Stage};

/// A call of the engine, as a metric's label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub(super) enum Call {
    Attach,
    Detach,
    Resize,
    Heal,
    #[cfg(feature = "journal")]
    Recover,
    Reap,
}

/// An error that is counted by its kind.
pub(super) trait Failure {
    fn kind(&self) -> ErrorKind;
}

impl Failure for Error {
    fn kind(&self) -> ErrorKind {
        self.kind()
    }
}

/// Runs a call and records its duration and its outcome.
pub(super) fn measured<T, E: Failure>(
    call: Call,
    run: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    measured_by(call, run, |result| {
        result.as_ref().map(drop).map_err(Failure::kind)
    })
}

/// As [`measured`], for a call whose result says in another way how it ended.
pub(super) fn measured_by<T>(
    call: Call,
    run: impl FnOnce() -> T,
    outcome: impl FnOnce(&T) -> Result<(), ErrorKind>,
) -> T {
    let begun = Instant::now();
    let result = run();
    record::call(call, outcome(&result), begun.elapsed());
    result
}

pub(super) use record::{heal_report, session_recovery, stage, stale_lun};

#[cfg(not(feature = "metrics"))]
mod record {
    use super::{Call, Duration, ErrorKind, Stage};

    pub(super) fn call(_: Call, _: Result<(), ErrorKind>, _: Duration) {}

    pub(in crate::engine) fn stage(_: Call, _: Stage, _: Duration) {}

    pub(in crate::engine) fn stale_lun(_: &'static str, _: &'static str) {}

    pub(in crate::engine) fn heal_report(_: &'static str) {}

    pub(in crate::engine) fn session_recovery(_: &'static str) {}
}

#[cfg(feature = "metrics")]
mod record {
    use metrics::{Unit, counter, gauge, histogram};

    use super::{Call, Duration, ErrorKind, Stage};
    use crate::engine::Engine;

    const CALL: &str = "lunbd_call_seconds";
    const CALLS: &str = "lunbd_calls_total";
    const STAGE: &str = "lunbd_stage_seconds";
    const STALE_LUNS: &str = "lunbd_stale_luns_total";
    const HEALS: &str = "lunbd_heals_total";
    const RECOVERIES: &str = "lunbd_session_recoveries_total";
    const STUCK: &str = "lunbd_stuck_calls";
    const EVENTS: &str = "lunbd_uevents_total";
    const FOREIGN: &str = "lunbd_uevent_foreign_messages_total";
    const CUT: &str = "lunbd_uevents_cut_total";
    const OVERRUNS: &str = "lunbd_uevent_overruns_total";
    const RESYNCS: &str = "lunbd_uevent_resyncs_total";
    const WATCHES: &str = "lunbd_watches";
    const WAITS: &str = "lunbd_watch_waits_total";
    const LONGEST_WAIT: &str = "lunbd_watch_longest_wait_seconds";

    impl Call {
        fn as_str(self) -> &'static str {
            self.into()
        }
    }

    pub(super) fn call(call: Call, outcome: Result<(), ErrorKind>, took: Duration) {
        let call = call.as_str();
        let outcome = outcome.map_or_else(ErrorKind::as_str, |()| "ok");
        histogram!(CALL, "call" => call).record(took);
        counter!(CALLS, "call" => call, "outcome" => outcome).increment(1);
    }

    pub(in crate::engine) fn stage(call: Call, stage: Stage, took: Duration) {
        histogram!(STAGE, "call" => call.as_str(), "stage" => stage.as_str()).record(took);
    }

    pub(in crate::engine) fn stale_lun(evidence: &'static str, outcome: &'static str) {
        counter!(STALE_LUNS, "evidence" => evidence, "outcome" => outcome).increment(1);
    }

    pub(in crate::engine) fn heal_report(outcome: &'static str) {
        counter!(HEALS, "outcome" => outcome).increment(1);
    }

    pub(in crate::engine) fn session_recovery(outcome: &'static str) {
        counter!(RECOVERIES, "outcome" => outcome).increment(1);
    }

    impl Engine {
        /// Hands the hub's counters and the stuck calls to the recorder of the `metrics` facade,
        /// and describes all metrics. Call it before each time that the recorder is read. The
        /// engine's calls record their own metrics as they happen.
        ///
        /// | name | kind | labels | unit | what |
        /// |---|---|---|---|---|
        /// | `lunbd_call_seconds` | histogram | `call` | seconds | how long a call took |
        /// | `lunbd_calls_total` | counter | `call`, `outcome`: `ok` or the kind of the error | calls | how calls ended |
        /// | `lunbd_stage_seconds` | histogram | `call`, `stage` | seconds | how long each stage of a call took, also a failed one; of parallel paths, each |
        /// | `lunbd_stale_luns_total` | counter | `evidence`, `outcome` | devices | stale LUNs found |
        /// | `lunbd_heals_total` | counter | `outcome` | checks | checks of an NBD device by a heal or a [`Healer`](crate::engine::Healer) |
        /// | `lunbd_session_recoveries_total` | counter | `outcome` | reports | reports of a [`SessionRecovery`](crate::engine::SessionRecovery) about lost iSCSI sessions |
        /// | `lunbd_stuck_calls` | gauge | | calls | abandoned kernel calls that have not returned |
        /// | `lunbd_uevents_total` | counter | | events | events that the hub read |
        /// | `lunbd_uevent_foreign_messages_total` | counter | | datagrams | messages that were no event |
        /// | `lunbd_uevents_cut_total` | counter | | events | events delivered with something left out |
        /// | `lunbd_uevent_overruns_total` | counter | | overruns | overruns of a socket's buffer |
        /// | `lunbd_uevent_resyncs_total` | counter | | notices | resyncs delivered to watches |
        /// | `lunbd_watches` | gauge | | watches | current watches |
        /// | `lunbd_watch_waits_total` | counter | `outcome`: `notice` or `deadline` | waits | how the waits of watches ended |
        /// | `lunbd_watch_longest_wait_seconds` | gauge | | seconds | the longest wait that ended with a notice |
        ///
        /// `call` is `attach`, `detach`, `resize`, `heal`, `recover` or `reap`. A `recover` is
        /// that of a journal, or of one volume, whose outcome is then that of the volume.
        pub fn publish_metrics(&self) {
            describe();
            let counters = self.hub().counters();
            counter!(EVENTS).absolute(counters.events);
            counter!(FOREIGN).absolute(counters.foreign_messages);
            counter!(CUT).absolute(counters.cut);
            counter!(OVERRUNS).absolute(counters.overruns);
            counter!(RESYNCS).absolute(counters.resyncs);
            counter!(WAITS, "outcome" => "notice").absolute(counters.waits);
            counter!(WAITS, "outcome" => "deadline").absolute(counters.waits_in_vain);
            gauge!(WATCHES).set(as_float(counters.watches));
            gauge!(LONGEST_WAIT).set(counters.longest_wait.as_secs_f64());
            let stuck = self.stuck_calls().len();
            gauge!(STUCK).set(as_float(u64::try_from(stuck).unwrap_or(u64::MAX)));
        }
    }

    /// Exact up to four thousand million, which no count here exceeds.
    fn as_float(count: u64) -> f64 {
        f64::from(u32::try_from(count).unwrap_or(u32::MAX))
    }

    fn describe() {
        use metrics::{describe_counter, describe_gauge, describe_histogram};
        describe_histogram!(CALL, Unit::Seconds, "how long a call took");
        describe_counter!(CALLS, Unit::Count, "how calls ended");
        describe_histogram!(STAGE, Unit::Seconds, "how long each stage of a call took");
        describe_counter!(STALE_LUNS, Unit::Count, "stale LUNs found");
        describe_counter!(HEALS, Unit::Count, "NBD devices that a heal checked");
        describe_counter!(RECOVERIES, Unit::Count, "recoveries of lost iSCSI sessions");
        describe_gauge!(
            STUCK,
            Unit::Count,
            "abandoned kernel calls that have not returned"
        );
        describe_counter!(EVENTS, Unit::Count, "events that the hub read");
        describe_counter!(FOREIGN, Unit::Count, "messages that were no event");
        describe_counter!(CUT, Unit::Count, "events delivered with something left out");
        describe_counter!(OVERRUNS, Unit::Count, "overruns of a socket's buffer");
        describe_counter!(RESYNCS, Unit::Count, "resyncs delivered to watches");
        describe_gauge!(WATCHES, Unit::Count, "current watches");
        describe_counter!(WAITS, Unit::Count, "how the waits of watches ended");
        describe_gauge!(
            LONGEST_WAIT,
            Unit::Seconds,
            "the longest wait that ended with a notice"
        );
    }
}
