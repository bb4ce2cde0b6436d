//! The mark of an event that we request from the kernel.

use crate::error::{Error, ErrorKind, Result};

/// A random UUID (RFC 9562, 5.4) as text, which the kernel accepts as a mark
/// (`lib/kobject_uevent.c`).
pub(super) fn new() -> Result<String> {
    const VERSION_AND_VARIANT: u128 = 0xf000_c000_0000_0000_0000;
    const RANDOM: u128 = 0x4000_8000_0000_0000_0000;
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|error| {
        let message = format!("the kernel gives no random bytes: {error}");
        Error::new(ErrorKind::Io, message)
    })?;
    let number = u128::from_be_bytes(bytes) & !VERSION_AND_VARIANT | RANDOM;
    let mut text = format!("{number:032x}");
    for place in [20, 16, 12, 8] {
        text.insert(place, '-');
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_has_the_form_of_a_random_uuid_and_is_another_each_time() {
        let mark = new().unwrap();
        let lengths: Vec<usize> = mark.split('-').map(str::len).collect();
        assert_eq!(lengths, [8, 4, 4, 4, 12], "{mark}");
        assert_eq!(mark.as_bytes()[14], b'4', "{mark}");
        assert!(b"89ab".contains(&mark.as_bytes()[19]), "{mark}");
        assert_ne!(mark, new().unwrap());
    }
}
