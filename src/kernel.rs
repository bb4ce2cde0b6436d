//! Access to the kernel: each function reads or writes one attribute or file, or calls one
//! ioctl. It has no policy and no retries.

pub(crate) mod block_tree;
pub mod blockdev;
mod btrfs_devices;
pub(crate) mod device_dir;
pub mod devices;
mod directory;
pub(crate) mod dm;
pub(crate) mod exports;
pub(crate) mod file_server_lookup;
pub(crate) mod file_servers;
pub mod file_system;
pub(crate) mod generic_nodes;
pub(crate) mod genl;
pub(crate) mod given_up;
pub(crate) mod iscsi_netlink;
mod locks;
pub(crate) mod loops;
pub mod machine;
mod mount_sources;
pub mod mounts;
pub(crate) mod namespace;
pub(crate) mod netlink_port;
pub(crate) mod parallel;
pub(crate) mod peer;
pub(crate) mod pool;
mod proc_file;
pub mod process;
mod roots;
pub(crate) mod sg;
pub(crate) mod stream;
pub mod sysfs;
pub(crate) mod tcp;
pub(crate) mod threads;
pub(crate) mod udev_record;
pub(crate) mod unix_socket;
pub(crate) mod user_namespace;
pub(crate) mod worker;
pub(crate) mod written;

pub use devices::{DeviceAccess, Devices, OpenMode};
pub use roots::Roots;
