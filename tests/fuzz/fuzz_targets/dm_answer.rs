#![no_main]

#[path = "../../fuzz_seeds/entry.rs"]
#[allow(dead_code)]
mod entry;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    entry::dm_answer(bytes);
});
