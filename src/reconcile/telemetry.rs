//! The metrics of a reconciler, for a recorder of the `metrics` facade that the application has
//! installed (feature `metrics`).

use metrics::{Unit, counter, describe_counter, describe_gauge, gauge};

use super::progress::Counters;
use super::reconciler::Reconciler;

const WAKEUPS: &str = "lunbd_reconcile_wakeups_total";
const REFRESHES: &str = "lunbd_reconcile_refreshes_total";
const PLANS: &str = "lunbd_reconcile_plans_total";
const STEPS: &str = "lunbd_reconcile_steps_total";
const VOLUMES: &str = "lunbd_volumes";

impl Reconciler {
    /// Hands the [counters](Self::counters) and the numbers of volumes to the recorder of the
    /// `metrics` facade, and describes them. Call it beside
    /// [`Engine::publish_metrics`](crate::Engine::publish_metrics), before each time that the
    /// recorder is read.
    ///
    /// | name | kind | labels | unit | what |
    /// |---|---|---|---|---|
    /// | `lunbd_reconcile_wakeups_total` | counter | | wake-ups | wake-ups of the loop, by an event, a step's end, a timer or a call |
    /// | `lunbd_reconcile_refreshes_total` | counter | `scope`: `all` or `some` | refreshes | refreshes of the status of volumes; of `some`, only those of an event |
    /// | `lunbd_reconcile_plans_total` | counter | | plans | plans made |
    /// | `lunbd_reconcile_steps_total` | counter | `outcome`: `ok` or `failed` | steps | how steps ended |
    /// | `lunbd_volumes` | gauge | `state`: `wanted`, `in_use`, `running` or `failing` | volumes | volumes now; one may be in several states |
    pub fn publish_metrics(&self) {
        describe();
        let Counters {
            wakeups,
            full_refreshes,
            partial_refreshes,
            plans,
            steps,
            failures,
        } = self.counters();
        counter!(WAKEUPS).absolute(wakeups);
        counter!(REFRESHES, "scope" => "all").absolute(full_refreshes);
        counter!(REFRESHES, "scope" => "some").absolute(partial_refreshes);
        counter!(PLANS).absolute(plans);
        counter!(STEPS, "outcome" => "ok").absolute(steps.saturating_sub(failures));
        counter!(STEPS, "outcome" => "failed").absolute(failures);
        let wanted = self.shared.state().desired().len();
        for (state, count) in [
            ("wanted", wanted),
            ("in_use", self.in_use().len()),
            ("running", self.running_steps().len()),
            ("failing", self.errors().len()),
        ] {
            // Exact up to four thousand million, which the number of volumes does not exceed.
            let count = u32::try_from(count).unwrap_or(u32::MAX);
            gauge!(VOLUMES, "state" => state).set(f64::from(count));
        }
    }
}

fn describe() {
    describe_counter!(WAKEUPS, Unit::Count, "how often the loop woke");
    describe_counter!(REFRESHES, Unit::Count, "refreshes of the status of volumes");
    describe_counter!(PLANS, Unit::Count, "plans made");
    describe_counter!(STEPS, Unit::Count, "how steps ended");
    describe_gauge!(VOLUMES, Unit::Count, "volumes by what they are in");
}
