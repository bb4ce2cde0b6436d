//! measure
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, reason = "a test panics to fail")]
use std::time::Duration;
use vm_tests::guest::{ScsiDebug, UeventCounter};

fn show(what: &str, counter: &UeventCounter) {
    let events = counter.until_quiet(Duration::from_secs(4));
    println!("== {what}: {}", events.len());
    for event in events {
        println!("{:?} {} {:?}", event.kind(), event.devpath, event.at);
    }
}

#[test]
fn measure() {
    let target = ScsiDebug::with_luns(256);
    let c = UeventCounter::start();
    target.scan("0 0 7");
    show("first", &c);
    let c = UeventCounter::start();
    target.scan("0 0 8");
    show("further", &c);
    let c = UeventCounter::start();
    std::fs::write(target.device_dir(8).join("delete"), "1").unwrap();
    show("delete", &c);
    let c = UeventCounter::start();
    std::fs::write(target.device_dir(7).join("delete"), "1").unwrap();
    show("delete last", &c);
    let c = UeventCounter::start();
    target.scan("0 0 7");
    show("first again", &c);
    panic!("show");
}
