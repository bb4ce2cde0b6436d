//! A unit at two LUNs of one target, on the kernel of `tests/fake_kernel`.

use std::time::Duration;

use crate::fake_kernel::{Address, FakeKernel, Unit, access};
use lunbd::{AttachRequest, Deadline, Source};

#[test]
fn a_unit_without_a_unique_name_is_one_disk_at_both_addresses_of_its_number() {
    // The second address is number 1 in flat space.
    for (first, second) in [(1, 16_385), (16_385, 1)] {
        let fake = FakeKernel::with_hosts(1);
        let unit = Unit {
            // NAA 3 is locally assigned.
            naa: 0x3000_0000_0000_0001,
            ..Unit::disk(1)
        };
        for lun in [first, second] {
            fake.kernel()
                .change(|state| state.units.insert(Address::of(0, lun), unit.clone()));
        }
        let engine = access::engine(fake.root());
        let soon = || Deadline::after(Duration::from_secs(60));
        let attach = |lun: u64| {
            let source: Source = format!("scsi:0:0:0:{lun}").parse().unwrap();
            engine.attach(&AttachRequest::new(source), soon()).unwrap()
        };
        let one = attach(first);
        let other = attach(second);
        assert!(one.changed && !other.changed, "{other:?}");
        assert_eq!((other.hctl(), other.node), (one.hctl(), one.node));
        assert_eq!(fake.kernel().devices(), [format!("0:0:0:{first}")]);
    }
}
