//! Every VM test, in one program. The lab carries it into the guest, and pid 1 there runs one
//! test of it at a time.
//!
//! `vm-tests/README.md` shows how to add a test.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a test panics to fail, and prints what it saw"
)]

mod apply_followed_file;
mod apply_scsi_and_nbd;
mod attach;
mod behaviours;
mod capacity;
mod command;
mod command_flags_iscsi_nbd;
mod command_threads;
mod detach;
mod detach_crash;
mod fc_lab;
mod fc_multipath;
mod fc_paths;
mod fc_routes;
mod hub;
mod index_scsi_and_nbd;
mod iscsi_access_states;
mod iscsi_aliases;
mod iscsi_attach;
mod iscsi_crash;
mod iscsi_detach;
mod iscsi_discovery;
mod iscsi_faults;
mod iscsi_foreign_paths;
mod iscsi_heal_once;
mod iscsi_identity;
mod iscsi_in_use;
mod iscsi_inventory;
mod iscsi_lab;
mod iscsi_log_in;
mod iscsi_names;
mod iscsi_netlink_port;
mod iscsi_paths;
mod iscsi_proof;
mod iscsi_proxied;
mod iscsi_reap;
mod iscsi_reconcile;
mod iscsi_recovery;
mod iscsi_resize;
mod iscsi_routes;
mod iscsi_sessions;
mod iscsi_shared_session;
mod iscsi_sizes_lost;
mod iscsi_tgt;
mod iscsi_tunables;
mod iscsi_unanswered;
mod iscsi_unusable;
mod lab;
mod map_without_path;
mod mpath_container;
mod mpath_defaults;
mod mpath_map;
mod nbd;
mod nbd_content;
mod nbd_content_lvm;
mod nbd_devices;
mod nbd_evidence;
mod nbd_failed_flush;
mod nbd_grow;
mod nbd_heal;
mod nbd_images;
mod nbd_kernel;
mod nbd_kernel_links;
mod nbd_late_command;
mod nbd_late_receiver;
mod nbd_links;
mod nbd_receivers;
mod nbd_reformat;
mod nbd_replaced;
mod nbd_rounds;
mod nbd_tls;
mod nbd_tls_kept;
mod nbd_tls_shown;
mod nbd_tls_wire;
mod nbd_two_volumes;
mod nbd_vanished;
mod own_boot_crash_mpath;
mod own_boot_crash_nbd;
mod own_boot_faults_mpath;
mod own_boot_faults_nbd;
mod own_boot_reset_mpath_nbd;
mod own_boot_sg3_rules;
mod own_boot_systemd_lvm;
mod own_boot_systemd_nbd;
mod reconcile_nbd_under_kills;
mod reconcile_scsi_and_nbd;
mod recover_broken_scsi_and_nbd;
mod recover_scsi_and_nbd;
mod scsi_locks;
mod scsi_reap;
mod scsi_settle;
mod scsi_storm;
mod udevd;
mod usage_below_map;
mod usage_hidden_scsi;
mod usage_matrix_scsi_and_nbd;
mod usage_scsi;
mod usage_unseen_scsi;
