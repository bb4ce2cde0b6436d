//! The framing of a multipathd command and reply: a length as a native-endian `u64`, which
//! counts the NUL at the end, then the text and the NUL (`libmpathcmd/mpath_cmd.c`).

use std::io::{self, Read, Write};

/// A limit above the longest reply of the largest machine, in bytes.
const LONGEST: u64 = 16 << 20;

pub(super) fn send(to: &mut impl Write, text: &str) -> io::Result<()> {
    let length = u64::try_from(text.len() + 1).map_err(io::Error::other)?;
    // The packet goes out in one write, because multipathd expects the whole length in its
    // first read (`multipathd/uxlsnr.c`, `handle_client`).
    let mut packet = length.to_ne_bytes().to_vec();
    packet.extend(text.as_bytes());
    packet.push(0);
    to.write_all(&packet)
}

/// # Errors
/// `InvalidData` if the reply announces more than 16 MiB; `UnexpectedEof` if it ends before
/// its length.
pub(super) fn receive(from: &mut impl Read) -> io::Result<String> {
    let mut length = [0; 8];
    from.read_exact(&mut length)?;
    let length = u64::from_ne_bytes(length);
    if length > LONGEST {
        let message = format!("it announces a reply of {length} bytes");
        return Err(io::Error::new(io::ErrorKind::InvalidData, message));
    }
    // The buffer grows with the bytes that arrive, not with the announced length.
    let mut bytes = Vec::new();
    from.take(length).read_to_end(&mut bytes)?;
    if u64::try_from(bytes.len()).ok() != Some(length) {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    if bytes.last() == Some(&0) {
        bytes.pop();
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packet_is_its_length_with_the_nul_then_the_text_and_the_nul() {
        let mut packet = Vec::new();
        send(&mut packet, "ok\n").unwrap();
        assert_eq!(packet, [&4_u64.to_ne_bytes()[..], b"ok\n\0"].concat());
        assert_eq!(receive(&mut &packet[..]).unwrap(), "ok\n");
    }

    #[test]
    fn a_reply_that_is_too_long_or_ends_early_is_an_error() {
        let kind = |bytes: &[u8]| receive(&mut &*bytes).unwrap_err().kind();
        assert_eq!(kind(&u64::MAX.to_ne_bytes()), io::ErrorKind::InvalidData);
        let too_long = (LONGEST + 1).to_ne_bytes();
        assert_eq!(kind(&too_long), io::ErrorKind::InvalidData);
        assert_eq!(kind(&LONGEST.to_ne_bytes()), io::ErrorKind::UnexpectedEof);
        assert_eq!(kind(&[4, 0, 0]), io::ErrorKind::UnexpectedEof);
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_panic(bytes: Vec<u8>) {
            let _ = receive(&mut &bytes[..]);
        }

        #[test]
        fn what_is_sent_is_received(text in "[^\0]*") {
            let mut packet = Vec::new();
            send(&mut packet, &text).unwrap();
            proptest::prop_assert_eq!(receive(&mut &packet[..]).unwrap(), text);
        }
    }
}
