//! CHAP secrets appear nowhere: not in a trace, not in an error, and not in the debug output of
//! an option or a request.
#![allow(clippy::unwrap_used, reason = "a test panics to fail")]

mod iscsi_target;

use std::fmt::{Debug, Write as _};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use iscsi_target::*;
use lunbd::iscsi::{Credentials, Secret, SessionName, SessionOptions, connect};
use lunbd::{AttachRequest, Deadline, Source};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::{Context, SubscriberExt};

const OURS: &str = "what-i-know-alone";
const THEIRS: &str = "what-it-knows-alone";

/// Everything that is traced, at every level.
#[derive(Clone, Default)]
struct Notes(Arc<Mutex<String>>);

struct Words<'a>(&'a mut String);

impl Visit for Words<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        writeln!(self.0, "{}={value:?}", field.name()).unwrap();
    }
}

impl<S: Subscriber> Layer<S> for Notes {
    fn on_new_span(&self, attributes: &Attributes<'_>, _: &Id, _: Context<'_, S>) {
        attributes.record(&mut Words(&mut self.0.lock().unwrap()));
    }

    fn on_record(&self, _: &Id, values: &Record<'_>, _: Context<'_, S>) {
        values.record(&mut Words(&mut self.0.lock().unwrap()));
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        event.record(&mut Words(&mut self.0.lock().unwrap()));
    }
}

#[test]
fn neither_traces_nor_errors_nor_requests_say_a_secret() {
    let notes = Notes::default();
    let subscriber = tracing_subscriber::registry().with(notes.clone());
    tracing::subscriber::set_global_default(subscriber).unwrap();
    let secret = |text| Secret::new(text).unwrap();
    let one_way = Credentials::new("me", secret(OURS)).unwrap();
    let mutual = one_way.clone().mutual(None, secret(THEIRS)).unwrap();
    // One target accepts us; one does not prove itself, and one proves itself wrongly.
    let mut said = String::new();
    for (credentials, keys) in [
        (&one_way, ""),
        (&mutual, ""),
        (&mutual, "CHAP_N=it\0CHAP_R=0x00\0"),
    ] {
        let comes_in = std::ptr::eq(credentials, &raw const one_way);
        let target = Target::one(move |talk| {
            talk.until_proof("0x0102030405060708")?;
            talk.take(0x43)?;
            talk.must(talk.value("CHAP_R").is_some(), "a response")?;
            talk.login(TO_OPERATIONAL, keys)?;
            if comes_in {
                talk.take(0x43)?;
                talk.login(TO_FULL, "HeaderDigest=None\0DataDigest=None\0")?;
            }
            talk.expect_close()
        });
        let name = SessionName {
            initiator: "iqn.2026-01.example:me".parse().unwrap(),
            target: "iqn.2026-01.example:array".parse().unwrap(),
            portal: target.portal().clone(),
        };
        let options = SessionOptions::new(name.initiator.clone()).credentials(credentials.clone());
        let deadline = Deadline::after(Duration::from_secs(25));
        let connected = connect(&name, &options, deadline);
        assert_eq!(connected.is_ok(), comes_in, "{connected:?}");
        let source: Source = "iscsi://10.0.0.1/iqn.2026-01.example:array/1"
            .parse()
            .unwrap();
        let request = AttachRequest::new(source).log_in(options.clone());
        write!(said, "{credentials:?}{options:?}{request:?}{connected:?}").unwrap();
        match connected {
            Ok(connection) => drop(connection),
            Err(error) => write!(said, "{error} {error:#}").unwrap(),
        }
        target.finish();
    }
    let traced = notes.0.lock().unwrap();
    assert!(traced.contains("portal="), "nothing was traced: {traced}");
    for (what, text) in [("traced", &*traced), ("said", &said)] {
        for secret in [OURS, THEIRS] {
            let as_hex = secret.bytes().fold(String::new(), |mut hex, byte| {
                write!(hex, "{byte:02x}").unwrap();
                hex
            });
            assert!(
                !text.contains(secret) && !text.contains(&as_hex),
                "{what}: {text}"
            );
            let as_bytes = format!("{:?}", secret.as_bytes());
            assert!(
                !text.contains(as_bytes.trim_matches(['[', ']'])),
                "{what}: {text}"
            );
        }
    }
}
