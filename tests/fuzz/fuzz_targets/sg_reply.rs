#![cfg_attr(any(fuzzing, clippy), no_main)]

// The library exports this only to fuzzers, and to clippy, which each run has check it.
#[cfg(any(fuzzing, clippy))]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    lunbd::sg_reply(bytes);
});

#[cfg(not(any(fuzzing, clippy)))]
fn main() {}
