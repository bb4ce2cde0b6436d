//! Powers the guest off through QEMU's isa-debug-exit device.

use std::fs::OpenOptions;
use std::io::{Seek, SeekFrom, Write};
use std::time::Duration;

/// QEMU exits with `(status << 1) | 1` when a byte is written to this port.
const DEBUG_EXIT_PORT: u64 = 0xf4;

pub(crate) fn off(status: u8) -> ! {
    // The driver's buffer may still hold what was sent on the serial line.
    if let Ok(port) = OpenOptions::new().write(true).open("/dev/ttyS1") {
        let _best_effort = nix::sys::termios::tcdrain(&port);
    }
    if let Ok(mut ports) = OpenOptions::new().write(true).open("/dev/port")
        && ports.seek(SeekFrom::Start(DEBUG_EXIT_PORT)).is_ok()
    {
        let _does_not_return = ports.write_all(&[status]);
    }
    // Without the device, the kernel panics when pid 1 ends, and -no-reboot with panic=-1 makes
    // QEMU end too.
    std::process::exit(i32::from(status))
}

pub(crate) fn off_after(limit: Duration) {
    std::thread::spawn(move || {
        std::thread::sleep(limit);
        off(2)
    });
}
