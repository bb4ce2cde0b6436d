//! Recognises a kernel's death that is the emulator's fault.
//!
//! A kernel that replaces an instruction writes `int3` over it first (`text_poke_bp`,
//! `arch/x86/kernel/alternative.c`). An emulated processor may run its translation of that
//! `int3` when the kernel has finished and no longer expects it; then the kernel dies of it.
//! Its memory has the new instruction there. If memory has an `int3` instead, the kernel has
//! jumped to a place without an instruction, and that is a defect.

/// The console before its first oops, if that is of that kind. Later oopses follow from the
/// first.
pub(crate) fn console_before_death(console: &str) -> Option<&str> {
    let (before, oops) = console.split_once("int3: 0000 [#1]")?;
    let (_, code) = oops.lines().find_map(|line| line.split_once("Code: "))?;
    let before = before.rsplit_once('\n').map_or("", |(before, _)| before);
    shows_what_a_kernel_writes(code).then_some(before)
}

/// In `48 89 df e9 <05> 00 00 00 c3` the marked byte follows the `int3`, so the byte before it
/// is the first of the bytes that ran as `int3`.
fn shows_what_a_kernel_writes(code: &str) -> bool {
    let bytes: Vec<&str> = code.split_whitespace().collect();
    let Some(marked) = bytes.iter().position(|byte| byte.starts_with('<')) else {
        return false;
    };
    let Some(first) = marked.checked_sub(1).map(|at| bytes[at]) else {
        return false;
    };
    match (first, bytes[marked].trim_matches(['<', '>'])) {
        // A call, a long and a short jump.
        ("e8" | "e9" | "eb", _) => true,
        // The no-op instructions of five and of two bytes.
        (first, second) => [("0f", "1f"), ("66", "90")].contains(&(first, second)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn console(oops: &str, code: &str) -> String {
        format!(
            "[ 36.7] {oops}\n[ 36.7] CPU: 1 PID: 77 Comm: iscsid\n[ 36.7] Code: {code}\n\
             [ 36.7] RSP: 0018:ffffb1\n"
        )
    }

    fn killed(console: &str) -> bool {
        console_before_death(console).is_some()
    }

    #[test]
    fn what_the_kernel_told_before_its_death_has_no_line_of_the_oops() {
        let oops = console("Oops: int3: 0000 [#1] SMP", "48 89 df e9 <05> 00 00 00 c3");
        let told = "[ 36.6] INFO: task a:1 blocked for more than 120 seconds.";
        assert_eq!(console_before_death(&format!("{told}\n{oops}")), Some(told));
        assert_eq!(console_before_death(&oops), Some(""));
    }

    #[test]
    fn a_kernel_that_dies_of_its_own_patch_differs_from_one_that_dies_otherwise() {
        let int3 = "Oops: int3: 0000 [#1] SMP NOPTI";
        for code in [
            "48 89 df e9 <05> 00 00 00 c3",
            "48 89 df e8 <05> 00 00 00 c3",
            "48 89 df 0f <1f> 44 00 00 c3",
            "48 89 df 66 <90> c3",
            "48 89 df eb <1c> c3",
        ] {
            assert!(killed(&console(int3, code)), "{code}");
            assert!(killed(&console("int3: 0000 [#1] PREEMPT SMP", code)));
            assert!(!killed(&console("Oops: 0000 [#1] PREEMPT SMP", code)));
            assert!(!killed(&console("Oops: int3: 0000 [#2] SMP", code)));
        }
        for code in [
            // An `int3` that is in memory: padding between two functions.
            "cc cc cc cc <cc> cc cc 48 89",
            "48 89 df cc <05> 00 00 00 c3",
            "48 89 df 0f <0b> c3",
            "Unable to access opcode bytes at RIP 0x5.",
            "<05> 00",
        ] {
            assert!(!killed(&console(int3, code)), "{code}");
        }
        assert!(!killed("[ 36.7] Oops: int3: 0000 [#1] SMP NOPTI"));
    }
}
