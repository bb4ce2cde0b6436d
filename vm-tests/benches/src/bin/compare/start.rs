//! The cost of a process before it does anything, and of the engine's start.

use std::time::Instant;

use lunbd::{Engine, Roots};
use vm_bench::figures::{Series, Start};
use vm_tests::guest;

/// Rounds for each one of an attach, since a round is quick.
const TIMES: usize = 5;

pub(crate) fn measure(rounds: usize) -> Vec<Start> {
    let whole = |command: &'static [&'static str]| {
        let run = move || {
            guest::run(command);
        };
        (command.join(" "), Box::new(run) as Box<dyn Fn()>)
    };
    let engine = || drop(Engine::start(Roots::default()).expect("an engine"));
    let ways = [
        whole(&["true"]),
        whole(&["lunbd", "--version"]),
        whole(&["lunbd", "sessions"]),
        whole(&["lunbd", "list"]),
        whole(&["udevadm", "--version"]),
        ("an engine in the process".to_owned(), Box::new(engine)),
    ];
    let mut times = vec![Vec::new(); ways.len()];
    for round in 0..=rounds * TIMES {
        for ((_, run), times) in ways.iter().zip(&mut times) {
            let start = Instant::now();
            run();
            // The first round is not counted, since its caches are cold.
            if round > 0 {
                times.push(start.elapsed().as_secs_f64() * 1e3);
            }
        }
    }
    let named = ways.into_iter().zip(times);
    let row = |((way, _), times)| Start {
        way,
        took: Series::of(times),
    };
    named.map(row).collect()
}

pub(crate) fn print(rows: &[Start]) {
    println!("A process from its start to its end, median");
    for row in rows {
        println!("  {:<39} {:>8.1} ms", row.way, row.took.median);
    }
    println!();
}
