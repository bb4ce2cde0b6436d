//! The engine's behaviour with SCSI volumes, as one suite for two machines.
//!
//! `tests/on_a_fake_kernel/behaviours.rs` runs it on the kernel of `tests/fake_kernel`;
//! `vm-tests/tests/guest/behaviours.rs` runs the same source on real kernels with `scsi_debug`
//! and a real udevd. So the fake kernel must behave as the real ones do. A test here holds on
//! both machines; a test that needs only one of them belongs elsewhere.

pub(crate) mod attach;
pub(crate) mod detach;
pub(crate) mod hung;
pub(crate) mod lost;
pub(crate) mod machine;
pub(crate) mod minimum;
pub(crate) mod reconcile;
pub(crate) mod recovery;
pub(crate) mod replaced;
pub(crate) mod resize;
pub(crate) mod uevents;
pub(crate) mod volumes;

/// Makes a `#[test]` of each behaviour on the named machine. A behaviour that is not listed
/// here is dead code, which the compiler refuses.
#[macro_export]
macro_rules! behaviours {
    ($machine:ident) => {
        $crate::behaviours! { $machine:
            attach {
                one_of_many_luns_is_attached_and_no_other_device_appears,
                a_repeated_attach_returns_the_device_unchanged_and_proves_it_again,
                the_expected_unit_is_attached_by_any_of_its_names,
                a_wrong_expectation_leaves_nothing_behind,
                an_attach_that_expects_another_unit_leaves_another_processs_device,
                a_lun_that_is_not_there_is_not_found_within_a_second_and_leaves_nothing,
                a_host_that_is_not_there_is_named_with_those_that_are,
                a_channel_beyond_the_hosts_limits_is_refused_by_the_kernel,
                a_device_that_is_no_disk_is_not_supported_and_leaves_nothing_behind,
                two_concurrent_attaches_create_one_device_and_both_return_it,
                an_offline_device_is_not_handed_out_and_stays,
                an_attach_times_out_if_udevd_does_not_answer_and_the_next_one_takes_its_device,
                an_attach_that_is_cancelled_while_it_waits_removes_its_device,
                an_attach_that_is_cancelled_at_any_earlier_stage_leaves_nothing_behind,
            }
            uevents {
                an_attach_and_a_detach_cause_only_the_kernels_own_minimum_of_uevents_in_its_order,
            }
            detach {
                a_detached_disk_is_gone_from_sysfs_from_dev_and_from_udev,
                the_receipt_names_what_was_read_back,
                what_is_gone_already_is_detached_and_unchanged,
                a_disk_that_somebody_else_deleted_is_detached_and_unchanged,
                a_disk_is_detached_by_its_node_and_by_a_link_to_it,
                a_disk_of_another_unit_than_the_expected_one_is_left,
                a_disk_that_a_process_has_claimed_is_refused_and_the_process_is_named,
                a_process_that_has_a_disk_open_for_writing_is_refused_and_named,
                a_process_that_only_reads_does_not_hold_a_detach_up,
                a_mounted_disk_is_refused_with_its_mounts_path,
                an_offline_disk_without_users_is_detached_and_reported_as_unflushed,
                the_detach_of_an_offline_disk_waits_until_multipathd_has_closed_it,
                a_failed_flush_ends_the_detach_and_is_reported_until_the_data_is_abandoned,
            }
            replaced {
                an_unused_device_of_another_unit_is_replaced_and_its_links_are_the_new_units,
                a_device_of_another_unit_that_is_mounted_is_refused_and_left,
                a_mounted_disk_stays_the_unit_that_it_was_first_after_a_rescan,
                what_was_written_to_a_disk_never_goes_to_the_unit_that_a_rescan_found_there,
            }
            lost {
                a_device_deleted_at_any_stage_of_its_attach_ends_in_a_live_one_or_in_nothing,
                a_device_deleted_at_any_stage_of_its_detach_is_gone,
                a_device_put_offline_at_any_stage_of_its_attach_is_taken_away_again,
                a_device_replaced_at_any_stage_of_its_attach_is_not_taken_for_the_next_nor_the_next_taken_away,
                a_device_replaced_by_another_unit_at_any_stage_of_its_detach_is_not_taken_down_for_it,
                a_device_put_offline_at_any_stage_of_its_detach_is_never_said_to_be_flushed,
            }
            hung {
                a_scan_that_hangs_quarantines_its_host_until_it_returns_while_another_host_attaches,
                a_flush_that_hangs_quarantines_its_device_and_not_the_others_of_its_host,
            }
            resize {
                a_unit_that_grew_is_seen_at_its_new_size_once_it_is_resized,
                a_resize_beyond_the_units_size_is_not_ready,
                a_resize_names_an_offline_path_and_does_not_resize_it,
            }
            volumes {
                a_volume_is_attached_found_by_a_recovery_and_detached_without_a_record,
                a_volume_whose_unit_is_another_volumes_is_refused_and_taken_down_again,
                a_volume_that_somebody_deleted_is_attached_again_by_a_repeated_attach,
                an_attach_of_a_volume_that_fails_leaves_no_record,
                a_second_detach_of_a_volume_answers_as_the_first_did_until_something_stands_there,
                the_volume_of_a_source_a_node_or_a_name_is_found_in_a_journal,
                a_path_that_is_named_before_the_others_does_not_replace_the_device_of_a_volume,
                a_detach_of_a_volume_that_is_in_use_is_refused_and_the_volume_stays_complete,
                a_volume_is_not_gone_while_its_disk_stands_as_a_unit_that_a_rescan_found_there,
            }
            recovery {
                a_unit_that_is_another_device_now_is_changed_and_left_alone,
                a_unit_whose_paths_are_silent_is_left_alone_until_they_answer,
                a_resize_is_written_down_and_one_that_was_begun_is_finished,
                a_second_volume_whose_path_leads_to_the_first_ones_unit_is_taken_down_again,
            }
            reconcile {
                what_is_wanted_is_attached_what_is_lost_comes_back_and_the_rest_is_detached,
                a_path_that_is_lost_and_comes_back_is_taken_in_again,
                the_reconciler_grows_a_unit_with_its_array_and_delays_no_other_volume_until_then,
            }
        }
    };
    ($machine:ident: $($module:ident { $($name:ident,)* })*) => {
        $(mod $module {
            $(#[test]
            fn $name() {
                super::behaviour::$module::$name::<super::$machine>();
            })*
        })*
    };
}
