//! Users of a disk whose process shows no descriptor of it in its own table.

use std::path::Path;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;

use lunbd::ErrorKind;
use lunbd::error::Stage;
use vm_tests::guest::agent::{attach, detach, engine};
use vm_tests::guest::hidden_writers::{FixedFile, Mapper, OwnTable};
use vm_tests::guest::system_calls::SystemCalls;
use vm_tests::guest::{self, ScsiDebug, udevd};

/// Requires that a detach is refused while `user` has the disk, with `named` in the refusal,
/// and succeeds when `user` has released it.
fn is_refused<T>(named: &str, user: impl FnOnce(&Path) -> T) {
    let (engine, target) = (engine(), ScsiDebug::with_luns(2));
    let node = attach(&engine, &target, 1).node;
    udevd::settle();
    let held = user(&node);
    let failure = detach(&engine, &target, 1).unwrap_err();
    assert_eq!(failure.kind(), ErrorKind::InUse, "{failure}");
    assert_eq!(failure.stage(), Some(Stage::Claim), "{failure}");
    assert!(failure.to_string().contains(named), "{failure}");
    assert!(node.exists() && !failure.receipt.safe_to_unmap);
    drop(held);
    let detachment = detach(&engine, &target, 1).unwrap();
    assert!(detachment.safe_to_unmap);
    assert_eq!(detachment.receipt.unwrap().not_looked_at, []);
}

#[test]
fn a_writable_mapping_without_a_descriptor_keeps_the_disk() {
    is_refused("mapped for writing in process", Mapper::writing);
}

#[test]
fn a_mapping_that_is_only_readable_keeps_no_disk() {
    let (engine, target) = (engine(), ScsiDebug::with_luns(2));
    let node = attach(&engine, &target, 1).node;
    udevd::settle();
    let mapper = Mapper::reading(&node);
    assert!(detach(&engine, &target, 1).unwrap().safe_to_unmap);
    drop(mapper);
}

#[test]
fn a_file_that_is_registered_with_io_uring_and_closed_keeps_the_disk() {
    is_refused("registered with io_uring in process", |node| {
        let file = FixedFile::of(node);
        file.shown().lines().for_each(guest::tell);
        file
    });
}

#[test]
fn a_thread_with_a_table_of_descriptors_of_its_own_keeps_the_disk() {
    let us = format!("open for writing in process {}", std::process::id());
    is_refused(&us, OwnTable::with);
}

/// The system calls of one detach.
fn calls_of_a_detach() -> u64 {
    let (engine, target) = (engine(), ScsiDebug::with_luns(2));
    attach(&engine, &target, 1);
    udevd::settle();
    let calls = SystemCalls::of_this_process();
    let before = calls.count();
    detach(&engine, &target, 1).unwrap();
    calls.count() - before
}

#[test]
fn a_detach_makes_few_system_calls_for_each_process_and_each_thread_of_the_machine() {
    const PROCESSES: u64 = 50;
    const THREADS: u64 = 500;
    // The first detach also reads what a process reads only once.
    calls_of_a_detach();
    let alone = calls_of_a_detach();
    let sleep = |_| Command::new("sleep").arg("600").spawn().expect("sleep");
    let sleepers: Vec<Child> = (0..PROCESSES).map(sleep).collect();
    let beside_processes = calls_of_a_detach();
    for mut sleeper in sleepers {
        sleeper.kill().unwrap();
        sleeper.wait().unwrap();
    }
    let (end, ended) = mpsc::channel::<()>();
    let ended = Arc::new(Mutex::new(ended));
    let wait = |_| {
        let ended = Arc::clone(&ended);
        thread::spawn(move || drop(ended.lock().map(|ended| ended.recv())))
    };
    let threads: Vec<_> = (0..THREADS).map(wait).collect();
    let beside_threads = calls_of_a_detach();
    drop(end);
    for thread in threads {
        thread.join().unwrap();
    }
    let of_each = |beside: u64, count: u64| beside.saturating_sub(alone).div_ceil(count);
    let of_process = of_each(beside_processes, PROCESSES);
    let of_thread = of_each(beside_threads, THREADS);
    guest::tell(&format!(
        "{alone} calls alone, {beside_processes} beside {PROCESSES} processes ({of_process} \
         each), {beside_threads} beside {THREADS} threads ({of_thread} each)"
    ));
    assert!(of_process <= 40, "{of_process} for each process");
    assert!(of_thread <= 4, "{of_thread} for each thread");
}
