//! What is shown of a failed test.

use std::path::Path;

/// The evidence of a failed test.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Remains<'a> {
    pub(crate) log: &'a Path,
    /// Its output, or the console if the machine ended during the test.
    pub(crate) output: &'a str,
}

impl Remains<'_> {
    const LINES: usize = 16;

    /// The reader of the run may not have access to the machine with the log.
    pub(crate) fn shown(&self) -> String {
        let mut shown = String::new();
        for line in self.telling() {
            shown.push_str("     | ");
            shown.push_str(line);
            shown.push('\n');
        }
        format!("{shown}     log: {}", self.log.display())
    }

    /// The panic without its backtrace, or the end of the output if there is none.
    fn telling(&self) -> Vec<&str> {
        let lines: Vec<&str> = self.output.lines().collect();
        let panic = lines.iter().position(|line| line.contains(" panicked at "));
        let Some(panic) = panic else {
            return lines[lines.len().saturating_sub(Self::LINES)..].to_vec();
        };
        let message = lines[panic..].iter().take(Self::LINES);
        let ends = |line: &&&str| !line.starts_with("stack backtrace:");
        message.take_while(ends).copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_panic_its_message_is_shown_and_of_what_ended_otherwise_the_end() {
        let telling = |output: &str| {
            let log = Path::new("log");
            let shown: Vec<String> = Remains { log, output }
                .telling()
                .into_iter()
                .map(str::to_owned)
                .collect();
            shown
        };
        let panic = "before\nthread 'x' panicked at x.rs:1:1:\nleft: 1\nstack backtrace:\n 0: x";
        assert_eq!(
            telling(panic),
            ["thread 'x' panicked at x.rs:1:1:", "left: 1"]
        );
        let lines: Vec<String> = (0..40).map(|line| line.to_string()).collect();
        assert_eq!(telling(&lines.join("\n")), lines[24..]);
    }
}
