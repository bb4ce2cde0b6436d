//! Runs a fuzz target over its seeds, over each prefix of a seed, and over changed seeds for
//! `LUNBD_FUZZ_SECONDS` (2 if it is not set).
//!
//! No coverage feedback guides it: `tests/fuzz/run` does that, with libFuzzer.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use fastrand::Rng;

/// A longer input finds no more, and is slower.
const LONGEST: usize = 4096;

/// Numbers at which lengths and counts tend to be wrong.
const EDGES: [u64; 10] = [
    0,
    1,
    0x7f,
    0x80,
    0xff,
    0x7fff,
    0xffff,
    0x7fff_ffff,
    0xffff_ffff,
    u64::MAX,
];

/// Panics if the target does, and then prints its input. Also panics if the target understands
/// none of its seeds.
pub(crate) fn run(target: &str, entry: fn(&[u8]) -> bool) {
    let seeds = seeds_of(target);
    assert!(!seeds.is_empty(), "{target} has no seeds");
    let mut understood = 0;
    for seed in &seeds {
        for length in 0..seed.len() {
            give(target, entry, &seed[..length]);
        }
        understood += usize::from(give(target, entry, seed));
    }
    assert!(understood > 0, "{target} understands none of its seeds");
    let number = std::env::var("LUNBD_FUZZ_SEED");
    let number = number.map_or_else(|_| fastrand::u64(..), |number| number.parse().unwrap());
    println!("{target}: LUNBD_FUZZ_SEED={number}");
    let mut rng = Rng::with_seed(number);
    let (began, budget) = (Instant::now(), budget());
    let mut inputs = 0_u64;
    while began.elapsed() < budget {
        let mut input = seeds[rng.usize(..seeds.len())].clone();
        for _ in 0..rng.usize(1..=8) {
            change(&mut input, &seeds, &mut rng);
        }
        input.truncate(LONGEST);
        give(target, entry, &input);
        inputs += 1;
    }
    println!(
        "{target}: {understood} of {} seeds understood, {inputs} changed",
        seeds.len()
    );
    assert!(inputs > 0, "{target} had no time");
}

fn budget() -> Duration {
    let seconds = std::env::var("LUNBD_FUZZ_SECONDS").ok();
    Duration::from_secs(seconds.map_or(2, |seconds| seconds.parse().unwrap()))
}

fn seeds_of(target: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz_seeds");
    let mut seeds: Vec<_> = fs::read_dir(folder.join(target))
        .unwrap()
        .map(|seed| seed.unwrap().path())
        .collect();
    // Sorted, so that a seed of the generator makes the same inputs on each machine.
    seeds.sort();
    seeds.iter().map(|seed| fs::read(seed).unwrap()).collect()
}

fn give(target: &str, entry: fn(&[u8]) -> bool, input: &[u8]) -> bool {
    /// No parser takes this long, even on the slowest machine.
    const LIMIT: Duration = Duration::from_secs(10);
    let began = Instant::now();
    let shown = Shown { target, input };
    let understood = entry(input);
    let took = began.elapsed();
    assert!(took < LIMIT, "it took {took:?}");
    drop(shown);
    understood
}

/// Prints the input if the thread panics.
struct Shown<'a> {
    target: &'a str,
    input: &'a [u8],
}

impl Drop for Shown<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!(
                "{}: broken by b\"{}\"",
                self.target,
                self.input.escape_ascii()
            );
        }
    }
}

/// Makes one change: to a bit, to bytes, to a number, or to the order.
fn change(input: &mut Vec<u8>, seeds: &[Vec<u8>], rng: &mut Rng) {
    if input.is_empty() {
        input.push(rng.u8(..));
        return;
    }
    let at = rng.usize(..input.len());
    let end = (at + rng.usize(1..=32)).min(input.len());
    match rng.u8(..8) {
        0 => input[at] ^= 1 << rng.u8(..8),
        1 => input[at] = rng.u8(..),
        2 => drop(input.drain(at..end)),
        3 => {
            let again = input[at..end].to_vec();
            input.splice(at..at, again);
        }
        4 => {
            let new: Vec<u8> = (0..end - at).map(|_| rng.u8(..)).collect();
            input.splice(at..at, new);
        }
        5 => put_number(input, at, rng),
        6 => {
            let other = &seeds[rng.usize(..seeds.len())];
            let from = rng.usize(..=other.len());
            input.truncate(at);
            input.extend(&other[from..]);
        }
        _ => {
            // Insert the same byte elsewhere, such as a second delimiter.
            let byte = input[rng.usize(..input.len())];
            input.insert(at, byte);
        }
    }
}

/// Writes an edge, or a little more or less, in 1, 2, 4 or 8 bytes of either byte order.
fn put_number(input: &mut [u8], at: usize, rng: &mut Rng) {
    let edge = EDGES[rng.usize(..EDGES.len())];
    let number = edge.wrapping_add(rng.u64(..5)).wrapping_sub(2);
    let width = [1, 2, 4, 8][rng.usize(..4)];
    let bytes = number.to_le_bytes();
    let mut bytes = bytes[..width].to_vec();
    if rng.bool() {
        bytes.reverse();
    }
    for (place, byte) in input[at..].iter_mut().zip(bytes) {
        *place = byte;
    }
}
