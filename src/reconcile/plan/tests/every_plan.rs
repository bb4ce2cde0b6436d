//! What holds for every plan: random wishes, and random volumes that are attached.

use proptest::prelude::*;

use super::*;

fn wish() -> impl Strategy<Value = Wish> {
    let flags = (any::<bool>(), any::<bool>(), 1..3_usize);
    let more = prop::option::of(0..12_u8);
    let expect = prop::option::of(0..12_u8);
    let named = (expect, prop::option::of(0..4_u64));
    (0..12_u8, 0..12_u8, more, named, flags).prop_map(
        |(volume, source, more, (expect, min_size), (nbd, read_only, min_paths))| Wish {
            volume,
            source,
            more,
            nbd,
            read_only,
            min_paths,
            expect,
            min_size,
        },
    )
}

fn condition() -> impl Strategy<Value = Condition> {
    prop::sample::select(vec![
        Condition::Complete,
        Condition::Complete,
        Condition::HalfAttached,
        Condition::HalfDetached,
        Condition::Gone,
        Condition::Changed,
        Condition::LinkDead,
    ])
}

fn operation() -> impl Strategy<Value = Option<Operation>> {
    let abandon_unwritten = false;
    prop::sample::select(vec![
        None,
        None,
        None,
        Some(Operation::Attach),
        Some(Operation::Detach { abandon_unwritten }),
        Some(Operation::Resize { at_least: None }),
    ])
}

fn actual() -> impl Strategy<Value = Actual> {
    let named = prop::option::of(0..12_u8);
    let facts = (any::<bool>(), any::<bool>(), named, 0..4_u64);
    let one = (wish(), condition(), operation(), facts);
    prop::collection::vec(one, 0..12).prop_map(|found| {
        // As in a journal, no two volumes claim the same resource.
        let wishes: Vec<Wish> = found.iter().map(|(wish, ..)| wish.clone()).collect();
        let known = desired(&wishes);
        let stand = known.iter().zip(found).map(|((volume, spec), found)| {
            let (_, condition, under_way, (doubted, unscanned, name, size)) = found;
            let mut there = VolumeStatus::new(volume.clone(), spec.clone(), condition);
            there.under_way = under_way;
            there.size = Some(size);
            "as it was seen".clone_into(&mut there.seen);
            there.verify_reason = doubted.then(|| "nobody has asked it".to_owned());
            if spec.nbd.is_none() {
                there.names.extend(name.map(unit));
                if unscanned {
                    there.unscanned.push("3:0:0:1".parse().unwrap());
                }
            }
            there
        });
        stand.collect()
    })
}

/// The state after all steps that can be done have ended.
fn carry_out(plan: &Plan, desired: &Desired, actual: &Actual) -> Actual {
    let mut after = actual.clone();
    for step in &plan.steps {
        for before in &step.after {
            assert!(!after.volumes.contains_key(before), "{plan}");
        }
        let volume = step.volume.clone();
        let stands = |spec: &VolumeSpec| {
            let mut there = VolumeStatus::new(volume.clone(), spec.clone(), Condition::Complete);
            let known = actual.get(&volume);
            there.names = known.map(|known| known.names.clone()).unwrap_or_default();
            let size = known.and_then(|known| known.size).unwrap_or(1);
            there.size = Some(match step.kind {
                StepKind::Resize => size.max(desired.min_size(&volume).unwrap()),
                _ => size,
            });
            there
        };
        match (step.kind, desired.get(&step.volume)) {
            (StepKind::Detach | StepKind::Finish, None) | (StepKind::Detach, Some(_)) => {
                after.volumes.remove(&step.volume);
            }
            (StepKind::Wait | StepKind::Refused, _) | (_, None) => {}
            (_, Some(wanted)) => {
                let there = stands(wanted);
                after.volumes.insert(there.volume.clone(), there);
            }
        }
    }
    after
}

proptest! {
    #[test]
    fn a_reached_state_needs_no_step(
        wishes in prop::collection::vec(wish(), 0..16), actual in actual()
    ) {
        let desired = desired(&wishes);
        let mut actual = actual;
        for _ in 0..4 {
            let plan = plan(&desired, &actual);
            actual = carry_out(&plan, &desired, &actual);
        }
        let left = plan(&desired, &actual);
        prop_assert!(left.steps.iter().all(|step| !step.kind.acts()), "{}", left);
        for (volume, spec) in desired.iter() {
            let there = actual.get(volume);
            let stands = there.is_some_and(|there| {
                there.spec == *spec && there.size >= desired.min_size(volume)
            });
            prop_assert!(stands || left.step(volume).is_some());
        }
        for there in actual.iter() {
            prop_assert!(desired.get(&there.volume).is_some());
        }
    }

    #[test]
    fn every_volume_is_as_wanted_or_has_one_step(
        wishes in prop::collection::vec(wish(), 0..16), actual in actual()
    ) {
        let desired = desired(&wishes);
        let plan = plan(&desired, &actual);
        let mut seen = BTreeSet::new();
        for step in &plan.steps {
            prop_assert!(seen.insert(&step.volume), "two steps of {}", step.volume);
            prop_assert!(!step.reason.is_empty());
        }
        for (volume, spec) in desired.iter() {
            let there = actual.get(volume);
            let stands = there.is_some_and(|there| {
                let is_large = there.size >= desired.min_size(volume);
                there.condition == Condition::Complete && there.spec == *spec && is_large
            });
            prop_assert!(stands || seen.contains(volume), "{volume} is forgotten");
        }
        for there in actual.iter() {
            let wanted = desired.get(&there.volume).is_some();
            prop_assert!(wanted || seen.contains(&there.volume), "{} stays", there.volume);
        }
    }

    #[test]
    fn no_step_comes_before_one_that_it_waits_for(
        wishes in prop::collection::vec(wish(), 0..16), actual in actual()
    ) {
        let plan = plan(&desired(&wishes), &actual);
        for (at, step) in plan.steps.iter().enumerate() {
            for before in &step.after {
                let place = plan.steps.iter().position(|other| other.volume == *before);
                prop_assert!(place.is_some_and(|place| place < at), "{}", plan);
            }
        }
    }

    #[test]
    fn the_order_of_the_volumes_does_not_change_the_plan(
        wishes in prop::collection::vec(wish(), 0..16), actual in actual()
    ) {
        let desired = desired(&wishes);
        // The wishes without conflicts, in reverse order.
        let kept: Vec<_> = wishes
            .iter()
            .filter(|wish| {
                let volume = id(wish.volume);
                let same = desired.get(&volume) == Some(&wish.spec());
                same && desired.min_size(&volume) == wish.min_size
            })
            .cloned()
            .rev()
            .collect();
        let backwards = self::desired(&kept);
        prop_assert_eq!(&backwards, &desired);
        let reversed: Actual = actual.iter().cloned().collect::<Vec<_>>().into_iter().rev().collect();
        prop_assert_eq!(plan(&backwards, &reversed), plan(&desired, &actual));
    }
}
