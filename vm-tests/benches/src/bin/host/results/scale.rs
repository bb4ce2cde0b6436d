//! One more device beside other devices, as a table.

use vm_bench::figures::{Beside, Scale, ScaleWay};

use super::{Results, conditions, line};

/// The part as Markdown.
pub(crate) fn write_scale(results: &Results, scale: &Scale) -> String {
    let mut text = format!(
        "# One attach and one detach beside others that are attached\n\n\
         {}\n\n\
         SCSI: LUNs of one `scsi_debug` target. NBD: exports of nbdkit over unix sockets. The \
         kernel's tracepoint counts the system calls of the process and of its children, \
         in rounds that are not timed, and before which udevd's idle workers have ended. \
         Medians of {} timed rounds and of at most 5 counted ones; a process that stays has \
         attached and detached three times before. The servers run in the same machine, and \
         an NBD detach looks at each connection and each thread of theirs: one way has the \
         connections of the others without their devices.\n\n\
         ![system calls](scale.svg)\n\n\
         | way | others | attach | | detach | | both | more than alone |\n\
         |---|--:|--:|--:|--:|--:|--:|--:|\n",
        conditions(results, "scale.json"),
        scale.rounds,
    );
    for way in &scale.ways {
        for beside in &way.beside {
            line(&mut text, &row(way, beside));
        }
    }
    text
}

fn row(way: &ScaleWay, beside: &Beside) -> String {
    let alone = way.beside.first().unwrap_or(beside);
    let more = |figure: fn(&Beside) -> f64| (figure(beside) / figure(alone) - 1.0) * 100.0;
    format!(
        "| `{}` | {} | {:.0} calls | {:.1} ms | {:.0} calls | {:.1} ms | {:.0} calls, {:.1} ms | {:+.0} % calls, {:+.0} % time |",
        way.way,
        beside.others,
        beside.attach.syscalls.median,
        beside.attach.wall_ms.median,
        beside.detach.syscalls.median,
        beside.detach.wall_ms.median,
        beside.syscalls(),
        beside.wall_ms(),
        more(Beside::syscalls),
        more(Beside::wall_ms),
    )
}
