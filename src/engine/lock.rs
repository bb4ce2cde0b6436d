//! The locks between the processes of one machine.

pub(super) mod device_lock;
pub(super) mod lock_file;
pub(super) mod run_dir;
pub(super) mod udev_lock;
