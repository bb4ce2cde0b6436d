//! The fields of `/proc/PID/stat` (proc(5)).

use std::io;
use std::path::Path;

use crate::kernel::proc_file;

/// The process's flags.
pub(super) const FLAGS: usize = 9;

/// The count of the process's threads.
pub(super) const NUM_THREADS: usize = 20;

/// The field that is not the command, by its number in proc(5).
///
/// # Errors
/// `ENOENT` or `ESRCH` if the process has ended.
pub(super) fn read_field(process: &Path, field: usize) -> io::Result<u64> {
    let text = proc_file::read_record(&process.join("stat"))?;
    let text = String::from_utf8_lossy(&text);
    number(&text, field).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// The command, field 2, may contain blanks and parentheses.
fn number(text: &str, field: usize) -> Option<u64> {
    let (_, behind_command) = text.rsplit_once(')')?;
    let mut fields = behind_command.split_ascii_whitespace();
    fields.nth(field.checked_sub(3)?)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_counted_behind_the_command() {
        let text = "7 (a) b (c) S 2 7 7 0 -1 69238880 1 2 3 4 5 6 7 8 20 0 3 0 99\n";
        assert_eq!(number(text, FLAGS), Some(69_238_880));
        assert_eq!(number(text, NUM_THREADS), Some(3));
        for damaged in ["", "7 (a", "7 (a) S 2"] {
            assert_eq!(number(damaged, FLAGS), None, "{damaged}");
        }
    }
}
