use proptest::prelude::*;

use super::*;

const REGISTERED: [&str; 5] = [
    "naa.5000c500a1b2c3d4",
    "naa.5000c500a1b2c3d5",
    "naa.60014051234567890abcdef012345678",
    "eui.0025385b61b0a1b2",
    "iqn.2003-01.org.x:a",
];
const LOCAL: [&str; 8] = [
    "naa.3000000100000001",
    "naa.3000000100000002",
    "naa.60000000000000000e00000000010001",
    "t10.IET_00010001",
    "t10.IET_00020001",
    "eui.0000005b61b0a1b2",
    "0V_port_1",
    "0V_port_2",
];

fn identity(names: &[&str], serial: Option<&str>) -> Identity {
    let mut names: Vec<Wwid> = names.iter().map(|name| name.parse().unwrap()).collect();
    names.sort();
    names.dedup();
    Identity {
        names,
        serial: serial.map(str::to_owned),
    }
}

fn compare(ours: &[&str], theirs: &[&str]) -> Comparison {
    identity(ours, None).compare(&identity(theirs, None))
}

const STRONG: Comparison = Comparison::Same(Strength::Strong);
const WEAK: Comparison = Comparison::Same(Strength::Weak);

#[test]
fn a_unique_name_decides_whatever_the_others_say() {
    let (naa, other) = (REGISTERED[0], REGISTERED[1]);
    assert_eq!(compare(&[naa, "t10.x"], &[naa, "t10.y"]), STRONG);
    assert_eq!(compare(&[naa, "t10.x", "0V_p"], &[naa]), STRONG);
    assert_eq!(compare(&[naa, other], &[naa]), STRONG);
    assert!(compare(&[naa, "t10.x"], &[other, "t10.x"]).is_proven_different());
    assert!(compare(&[naa], &[REGISTERED[2]]).is_proven_different());
    // Here one unique name agrees and another contradicts.
    let eui = "eui.0025385b61b0a1b3";
    let mixed = compare(&[naa, REGISTERED[3]], &[naa, eui]);
    let Comparison::Different(why) = mixed else {
        panic!("{mixed:?}");
    };
    assert_eq!(why.to_string(), format!("{} is not {eui}", REGISTERED[3]));
}

#[test]
fn names_that_anybody_may_give_agree_weakly_and_only_all_together() {
    let tgt = &LOCAL[..1];
    assert_eq!(compare(tgt, tgt), WEAK);
    assert!(compare(&LOCAL[..1], &LOCAL[1..2]).is_different());
    assert!(!compare(&LOCAL[..1], &LOCAL[1..2]).is_proven_different());
    // These have the same NAA 3, but different T10 texts.
    let [one, two] = [[LOCAL[0], LOCAL[3]], [LOCAL[0], LOCAL[4]]];
    assert!(compare(&one, &two).is_different());
    assert_eq!(compare(&one, &tgt[..1]), WEAK);
    assert_eq!(
        compare(&["t10.x", "0V_port_1"], &["t10.x", "0V_port_2"]),
        WEAK
    );
    assert!(compare(&["0V_port_1"], &["0V_port_2"]).is_different());
}

#[test]
fn without_a_unique_name_the_serial_number_is_compared_too() {
    let unit = |serial| identity(&["t10.x"], serial);
    assert_eq!(unit(Some("1")).compare(&unit(Some("1"))), WEAK);
    assert_eq!(unit(Some("1")).compare(&unit(None)), WEAK);
    assert!(unit(Some("1")).compare(&unit(Some("2"))).is_different());
    let named = |serial| identity(&REGISTERED[..1], serial);
    assert_eq!(named(Some("1")).compare(&named(Some("2"))), STRONG);
    let nameless = identity(&[], Some("1"));
    assert_eq!(nameless.compare(&nameless), Comparison::Unknown);
}

#[test]
fn a_unique_name_is_no_proof_where_the_t10_text_and_the_serial_number_both_contradict_it() {
    let unit = |text, serial| identity(&[REGISTERED[0], text], serial);
    let one = unit("t10.x", Some("1"));
    assert_eq!(one.compare(&unit("t10.y", Some("2"))), Comparison::Unknown);
    assert_eq!(one.compare(&unit("t10.x", Some("2"))), STRONG);
    assert_eq!(one.compare(&unit("t10.y", Some("1"))), STRONG);
    assert_eq!(one.compare(&unit("t10.y", None)), STRONG);
    let without_text = identity(&REGISTERED[..1], Some("2"));
    assert_eq!(one.compare(&without_text), STRONG);
}

#[test]
fn the_naa_2_that_spdk_makes_of_parts_of_a_name_only_supports() {
    // SPDK gives this name to both bdevs Malloc0 and Malloc1.
    const SPDK: &str = "naa.2000000347efeced";
    let malloc = |number: &str| {
        let text = format!("t10.INTEL_Malloc_disk_Malloc{number}");
        identity(&[SPDK, &text], Some(&format!("Malloc{number}")))
    };
    let (zero, one) = (malloc("0"), malloc("1"));
    assert!(zero.is_weak());
    assert_eq!(zero.compare(&zero), WEAK);
    assert!(zero.compare(&one).is_different());
    assert!(!zero.compare(&one).is_proven_different());
    // An NAA 2 of another company is unique.
    let other_company = &["naa.2000000348efeced"];
    assert_eq!(compare(other_company, other_company), STRONG);
}

#[test]
fn where_only_one_has_a_unique_name_nothing_makes_them_the_same() {
    let both = [REGISTERED[0], "t10.x"];
    assert_eq!(compare(&both, &["t10.x"]), Comparison::Unknown);
    assert!(compare(&both, &["t10.y"]).is_different());
    assert_eq!(compare(&both, &[]), Comparison::Unknown);
}

#[test]
fn names_of_which_only_some_are_shared_do_not_prove_one_unit_even_weakly() {
    let one = ["t10.x", "t10.y"];
    assert_eq!(compare(&one, &["t10.x", "t10.z"]), Comparison::Unknown);
    assert_eq!(compare(&one, &["t10.x"]), Comparison::Unknown);
    // Another kind agrees.
    let (local, text) = (LOCAL[0], "t10.x");
    let theirs = [local, text, "t10.z"];
    assert_eq!(
        compare(&[local, "t10.x", "t10.y"], &theirs),
        Comparison::Unknown
    );
}

#[test]
fn a_vendor_specific_name_does_not_count_if_one_unit_has_another_name() {
    let port = "0V_port_1";
    assert_eq!(compare(&["t10.x", port], &[port]), Comparison::Unknown);
    assert_eq!(
        compare(&["t10.x", port], &["0V_port_2"]),
        Comparison::Unknown
    );
}

#[test]
fn a_unit_without_a_name_is_not_compared_by_its_serial_number() {
    let nameless = identity(&[], Some("1"));
    let named = identity(&["t10.x"], Some("2"));
    assert_eq!(nameless.compare(&named), Comparison::Unknown);
    assert_eq!(named.compare(&nameless), Comparison::Unknown);
}

#[test]
fn only_a_unique_name_in_common_proves_one_unit() {
    assert!(compare(&REGISTERED[..1], &REGISTERED[..1]).is_proven_same());
    assert!(!compare(&LOCAL[..1], &LOCAL[..1]).is_proven_same());
    assert!(!compare(&REGISTERED[..1], &REGISTERED[1..2]).is_proven_same());
    assert!(!compare(&REGISTERED[..1], &LOCAL[..1]).is_proven_same());
}

#[test]
fn the_strongest_of_some_names_is_the_first_whatever_their_order() {
    let names = [LOCAL[3], LOCAL[6], REGISTERED[0]];
    let identity = Identity::of(names.map(|name| name.parse().unwrap()));
    assert_eq!(identity.wwid().unwrap().to_string(), REGISTERED[0]);
}

fn names() -> impl Strategy<Value = Identity> {
    let all = REGISTERED.iter().chain(&LOCAL).copied().collect::<Vec<_>>();
    let count = all.len();
    let serial = prop::option::of(prop::sample::select(vec!["1", "2"]));
    (prop::sample::subsequence(all, 0..count), serial)
        .prop_map(|(names, serial)| identity(&names, serial))
}

/// The same result with the two sides exchanged.
fn turned(comparison: Comparison) -> Comparison {
    match comparison {
        Comparison::Different(why) => Comparison::Different(Contradiction {
            strength: why.strength,
            ours: why.theirs,
            theirs: why.ours,
        }),
        other => other,
    }
}

proptest! {
    #[test]
    fn each_of_two_says_the_same_of_the_other(one in names(), other in names()) {
        prop_assert_eq!(one.compare(&other), turned(other.compare(&one)));
    }

    #[test]
    fn an_identity_with_a_name_is_the_same_as_itself(one in names()) {
        let has_names = !one.names.is_empty();
        prop_assert_eq!(one.compare(&one).is_same(), has_names);
        prop_assert_eq!(one.compare(&one) == WEAK, one.is_weak());
    }

    #[test]
    fn one_more_name_that_is_not_unique_never_makes_two_units_one(
        one in names(),
        other in names(),
        more in prop::sample::select(LOCAL.to_vec()),
    ) {
        let mut longer = one.clone();
        longer.names.push(more.parse().unwrap());
        longer.names.sort();
        longer.names.dedup();
        if one.compare(&other).is_different() {
            prop_assert!(!longer.compare(&other).is_same());
        }
        if one.compare(&other).is_proven_different() {
            prop_assert!(longer.compare(&other).is_proven_different());
        }
        if one.other_serial(&other).is_none() {
            prop_assert_eq!(
                one.compare(&other).is_proven_same(),
                longer.compare(&other).is_proven_same()
            );
        }
    }
}
