#![cfg_attr(fuzzing, no_main)]

// The library exports this only to fuzzers.
#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    lunbd::sg_reply(bytes);
});

#[cfg(not(fuzzing))]
fn main() {}
