//! The virtual machine: the same recipe for every boot.

use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use vm_tests::job::{GUEST_MARK, SEED_MARK, WHOLE_SWEEPS};

use crate::cost;
use crate::kernel::Series;
use crate::seed::SEED;

/// How much the kernel prints on its console.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Console {
    /// Only errors: each character costs time under emulation.
    Quiet,
    /// Also warnings: a boot that ends in a reset leaves nothing else.
    Warnings,
    /// Everything from the start, to show where a boot ends.
    Verbose,
}

/// A QEMU process that ends when this is dropped or when the lab is killed.
pub(crate) struct Machine(Child);

impl Machine {
    /// `command` is [`Emulator::command`](crate::emulator::Emulator::command). The console goes to
    /// the file `console`, the second serial port to the child's standard
    /// output. With a `disk`, which the guest sees as `/dev/vda`, a reset of the machine boots
    /// it again.
    ///
    /// The calling thread must outlive the machine: the kernel sends the parent-death signal
    /// when the *thread* that started QEMU ends.
    pub(crate) fn start(
        mut command: Command,
        vmlinux: &Path,
        initrd: &Path,
        console: &Path,
        series: Series,
        verbosity: Console,
        disk: Option<&Path>,
    ) -> Result<Self> {
        command.args(["-m", "2048", "-smp", "2", "-nodefaults", "-no-user-config"]);
        command.args(["-display", "none"]);
        match disk {
            None => command.arg("-no-reboot"),
            Some(disk) => command
                .arg("-drive")
                .arg(format!(
                    "if=none,id=kept,format=raw,file={}",
                    disk.display()
                ))
                .args(["-device", "virtio-blk-pci,drive=kept"]),
        };
        command
            .arg("-kernel")
            .arg(vmlinux)
            .arg("-initrd")
            .arg(initrd);
        command
            .arg("-append")
            .arg(kernel_parameters(series, verbosity));
        command.args(["-device", "isa-debug-exit,iobase=0xf4,iosize=0x04"]);
        command
            .arg("-serial")
            .arg(format!("file:{}", console.display()));
        command.args([
            "-chardev",
            "stdio,id=reports,signal=off",
            "-serial",
            "chardev:reports",
        ]);
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        child.map(Self).context("setpriv (util-linux)")
    }

    /// The lines that the guest writes to its second serial port. Can be taken once.
    pub(crate) fn reports(&mut self) -> Result<ChildStdout> {
        self.0.stdout.take().context("QEMU's output")
    }

    /// The processor time that QEMU has used.
    pub(crate) fn processor_time(&self) -> Result<Duration> {
        cost::processor_time(self.0.id()).context("QEMU")
    }

    pub(crate) fn kill(&mut self) -> Result<()> {
        self.0.kill().context("QEMU")
    }

    /// Waits until QEMU ends, and also returns its processor time.
    pub(crate) fn wait(mut self) -> Result<(ExitStatus, Duration)> {
        let processor = cost::processor_time_once_ended(self.0.id()).context("QEMU")?;
        Ok((self.0.wait().context("QEMU")?, processor))
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ended_already = self.0.kill();
        let _ended_already = self.0.wait();
    }
}

/// Whether `LUNBD_VM_SWEEPS` asks for each point of each sweep.
pub(crate) fn sweeps_are_whole() -> Result<bool> {
    match std::env::var("LUNBD_VM_SWEEPS").as_deref() {
        Ok("whole") => Ok(true),
        Ok("") | Err(_) => Ok(false),
        Ok(other) => bail!("LUNBD_VM_SWEEPS={other}: expected whole"),
    }
}

fn kernel_parameters(series: Series, verbosity: Console) -> String {
    let verbosity = match verbosity {
        Console::Quiet => "quiet",
        Console::Warnings => "loglevel=5",
        Console::Verbose => "earlyprintk=serial ignore_loglevel",
    };
    let (seed, kernel) = (*SEED, series.kernel());
    let sweeps = if sweeps_are_whole().unwrap_or_default() {
        format!(" {WHOLE_SWEEPS}")
    } else {
        String::new()
    };
    // - oops=panic: no further test can rely on a kernel that oopsed.
    // - no_timer_check: the kernel must not count the timer's ticks as it boots. If the
    //   emulator gets no processor for a moment there are too few, and the kernel panics
    //   ("IO-APIC + timer doesn't work!").
    // - log_buf_len=4M: no test logs so much that the lab would miss a record.
    // - print-fatal-signals=1: the log says which signal killed a server.
    // - Mitigations protect nothing here, and Debian's kernels clear each page that they
    //   allocate: without both a boot takes a tenth less processor time under TCG.
    // - cryptomgr.notests: the kernel would test its ciphers as it boots, which takes about one of
    //   six seconds under TCG.
    // - transparent_hugepage=never: clearing 2 MiB for a process that uses little of it costs a
    //   twentieth of the processor time under TCG.
    // - tsc=reliable: otherwise the kernel finds that the emulator's two time stamp counters are
    //   not in step, and each look at the clock is a call into the emulator's HPET. With the
    //   counter the tests of attach and detach take 8 to 12 % less processor time.
    format!(
        "console=ttyS0 {verbosity} panic=-1 oops=panic no_timer_check print-fatal-signals=1 \
         mitigations=off init_on_alloc=0 cryptomgr.notests transparent_hugepage=never \
         tsc=reliable log_buf_len=4M scsi_mod.scan=manual {GUEST_MARK}={kernel} \
         {SEED_MARK}={seed}{sweeps}"
    )
}
