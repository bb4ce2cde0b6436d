//! What the demo runs in the guest.
fn main() {}
