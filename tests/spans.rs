//! What a subscriber of the `tracing` facade receives: each span names its volume, its device
//! or its stage.
#![allow(clippy::unwrap_used, reason = "a test panics to fail")]

#[allow(dead_code, reason = "each suite uses a part of it")]
mod machine;

use std::fmt::Debug;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lunbd::{AttachRequest, Deadline, DetachTarget, Engine, Source};
use machine::Machine;
use tracing::Subscriber;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

/// Records each span as `parent/name{field=value}`.
#[derive(Clone, Default)]
struct Notes(Arc<Mutex<Vec<String>>>);

struct Path(String);

#[derive(Default)]
struct Fields(Vec<String>);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.push(format!("{}={value:?}", field.name()));
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Notes {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        let span = context.span(id).unwrap();
        let above = span.parent().map(|parent| {
            let extensions = parent.extensions();
            extensions.get::<Path>().map(|path| path.0.clone() + "/")
        });
        let above = above.flatten().unwrap_or_default();
        let path = format!("{above}{}{{{}}}", span.name(), fields.0.join(","));
        self.0.lock().unwrap().push(path.clone());
        span.extensions_mut().insert(Path(path));
    }

    fn on_record(&self, id: &Id, record: &Record<'_>, context: Context<'_, S>) {
        let mut fields = Fields::default();
        record.record(&mut fields);
        let span = context.span(id).unwrap();
        let extensions = span.extensions();
        let path = &extensions.get::<Path>().unwrap().0;
        let note = format!("{path} {}", fields.0.join(","));
        self.0.lock().unwrap().push(note);
    }
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(30))
}

/// The spans that are recorded during `work`.
fn noted(work: impl FnOnce()) -> Vec<String> {
    let notes = Notes::default();
    let subscriber = tracing_subscriber::registry().with(notes.clone());
    tracing::subscriber::with_default(subscriber, work);
    std::mem::take(&mut *notes.0.lock().unwrap())
}

#[test]
fn an_attach_of_a_volume_names_the_volume_the_source_the_path_and_each_stage() {
    let machine = Machine::new();
    machine.host(3);
    let notes = noted(|| {
        let engine = Engine::start(machine.roots()).unwrap();
        let journal = engine.open_journal(soon()).unwrap();
        let source: Source = "scsi:3:0:0:7".parse().unwrap();
        let request = AttachRequest::new(source);
        let volume = "pvc-1".parse().unwrap();
        engine
            .attach_volume(&journal, &volume, &request, soon())
            .unwrap_err();
    });
    let attach = "attach_volume{volume=pvc-1}/attach{source=scsi:3:0:0:7}";
    let path = format!("{attach}/path{{hctl=3:0:0:7,via=scsi:3:0:0:7}}");
    for expected in [
        "attach_volume{volume=pvc-1}".to_owned(),
        attach.to_owned(),
        format!("{attach}/stage{{stage=resolve}}"),
        format!("{attach}/stage{{stage=lock}}"),
        path.clone(),
        format!("{path}/stage{{stage=scan}}"),
    ] {
        assert!(notes.contains(&expected), "no {expected} in {notes:#?}");
    }
}

#[test]
fn the_span_of_a_detach_names_what_is_detached() {
    let machine = Machine::new();
    machine.host(3);
    machine.disk("3:0:0:7", "sdb");
    let notes = noted(|| {
        let engine = Engine::start(machine.roots()).unwrap();
        let target: DetachTarget = "scsi:3:0:0:7".parse().unwrap();
        // The machine has the disk but no node for it.
        engine.detach(target, soon()).unwrap_err();
    });
    let expected = "detach{} target=\"scsi:3:0:0:7\"".to_owned();
    assert!(notes.contains(&expected), "no {expected} in {notes:#?}");
}
