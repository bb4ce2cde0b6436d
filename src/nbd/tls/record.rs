//! TLS records, one at a time.

use std::io::{self, Read, Write};

/// The length of a record's header in bytes (RFC 8446, 5.1): type, version, length.
const HEADER: usize = 5;

/// Reads no byte behind the present record, so that what the peer sends next stays in the
/// socket for the kernel.
pub(super) struct RecordReader<S> {
    stream: S,
    header: [u8; HEADER],
    /// How many bytes of the header have been read.
    have: usize,
    /// How many bytes of the record are still to be read.
    left: usize,
}

impl<S> RecordReader<S> {
    pub(super) fn new(stream: S) -> Self {
        Self {
            stream,
            header: [0; HEADER],
            have: 0,
            left: 0,
        }
    }

    /// Whether the last record was read to its end, and nothing of the next one.
    pub(super) fn is_between_two(&self) -> bool {
        self.have == 0
    }
}

impl<S: Read> Read for RecordReader<S> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let in_header = self.have < HEADER;
        let most = if in_header {
            HEADER - self.have
        } else {
            self.left
        };
        let most = most.min(buffer.len());
        let Some(buffer) = buffer.get_mut(..most) else {
            return Ok(0);
        };
        let read = self.stream.read(buffer)?;
        if in_header {
            for byte in buffer.iter().take(read) {
                if let Some(place) = self.header.get_mut(self.have) {
                    *place = *byte;
                }
                self.have += 1;
            }
            if self.have == HEADER {
                let [.., high, low] = self.header;
                self.left = usize::from(u16::from_be_bytes([high, low]));
            }
        } else {
            self.left -= read.min(self.left);
        }
        if self.have == HEADER && self.left == 0 {
            self.have = 0;
        }
        Ok(read)
    }
}

impl<S: Write> Write for RecordReader<S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_ends_at_the_end_of_a_record_however_much_is_there() {
        let two = [22, 3, 3, 0, 2, 7, 8, 23, 3, 3, 0, 0, 23, 3, 3, 0, 1, 9];
        let mut reader = RecordReader::new(&two[..]);
        let mut buffer = [0; 64];
        let mut lengths = Vec::new();
        let mut between = Vec::new();
        loop {
            match reader.read(&mut buffer).unwrap() {
                0 => break,
                read => lengths.push(read),
            }
            between.push(reader.is_between_two());
        }
        assert_eq!(lengths, [5, 2, 5, 5, 1]);
        assert_eq!(between, [false, true, true, false, true]);
    }

    #[test]
    fn a_small_buffer_gets_a_record_in_pieces() {
        let mut reader = RecordReader::new(&[23, 3, 3, 0, 3, 1, 2, 3, 99][..]);
        let mut record = Vec::new();
        let mut byte = [0; 1];
        while record.is_empty() || !reader.is_between_two() {
            assert_eq!(reader.read(&mut byte).unwrap(), 1);
            record.push(byte[0]);
        }
        assert_eq!(record, [23, 3, 3, 0, 3, 1, 2, 3]);
    }
}
