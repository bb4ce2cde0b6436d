//! Powers the guest off through QEMU's isa-debug-exit device.

use std::fs::OpenOptions;
use std::io::{Seek, SeekFrom, Write};
use std::time::Duration;

/// QEMU exits with `(status << 1) | 1` when a byte is written to this port. The guest runs on
/// until QEMU's main thread has seen it: QEMU 10.0.2 wrote up to 44 more bytes of a boot sector
/// (2026-11-29), and on a busy host the thread is later.
const DEBUG_EXIT_PORT: u64 = 0xf4;

pub(crate) fn off(status: u8) -> ! {
    // The driver's buffer may still hold what was sent on the serial line.
    if let Ok(port) = OpenOptions::new().write(true).open("/dev/ttyS1") {
        let _best_effort = nix::sys::termios::tcdrain(&port);
    }
    if let Ok(mut ports) = OpenOptions::new().write(true).open("/dev/port")
        && ports.seek(SeekFrom::Start(DEBUG_EXIT_PORT)).is_ok()
        && ports.write_all(&[status]).is_ok()
    {
        // The kernel would panic if pid 1 ended before QEMU does.
        loop {
            std::thread::park();
        }
    }
    // Without the port, that panic makes QEMU end, by -no-reboot and panic=-1.
    std::process::exit(i32::from(status))
}

pub(crate) fn off_after(limit: Duration) {
    std::thread::spawn(move || {
        std::thread::sleep(limit);
        off(2)
    });
}
