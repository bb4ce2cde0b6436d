#![cfg_attr(fuzzing, no_main)]

// The library has this one for fuzzers alone.
#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    lunbd::sg_reply(bytes);
});

#[cfg(not(fuzzing))]
fn main() {}
