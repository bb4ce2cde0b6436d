//! Groups the tests into boots.

use std::collections::VecDeque;

use vm_tests::job::TestCase;

/// Each test of a file with this prefix has its own boot.
const OWN_BOOT: &str = "own_boot_";

/// The least number of tests that share a boot before the next file gets another. It is small
/// enough that no machine runs long after the others have finished, and large enough to be
/// worth a boot, which costs about as much as three tests.
const WORTH_A_BOOT: usize = 35;

/// Files that take longer than a minute, mostly in waits. Units that have one start before the
/// others, so that no machine runs long after the others have finished.
const LONG: &[&str] = &[
    "behaviours",
    "fc_paths",
    "iscsi_paths",
    "iscsi_recovery",
    "iscsi_resize",
    "nbd_heal",
    "nbd_links",
    "nbd_tls",
    "recover_scsi_and_nbd",
];

/// The tests that one machine runs, one after another.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Unit {
    pub(crate) tests: Vec<TestCase>,
    /// The unit is a single test with its own boot.
    pub(crate) own_boot: bool,
}

/// The units of `tests`, which are sorted. The units with their own boots come first: they are
/// the sweeps and the storms, and the longest. Then the last names and the first take turns: the
/// files of NBD wait for most of their time, and others compute meanwhile. Of these the units with
/// [`LONG`] files come first. The last unit is halved, so that no machine runs long after the
/// others have finished.
pub(crate) fn of(tests: &[TestCase]) -> Vec<Unit> {
    let mut shared: Vec<Vec<TestCase>> = Vec::new();
    let mut own = Vec::new();
    for file in tests.chunk_by(|one, other| one.file == other.file) {
        if file[0].file.starts_with(OWN_BOOT) {
            own.extend(file.iter().map(|test| Unit {
                tests: vec![test.clone()],
                own_boot: true,
            }));
            continue;
        }
        match shared.last_mut() {
            Some(last) if last.len() < WORTH_A_BOOT => last.extend_from_slice(file),
            _ => shared.push(file.to_vec()),
        }
    }
    let mut left = VecDeque::from(shared);
    let mut in_order = Vec::new();
    while let Some(last) = left.pop_back() {
        in_order.push(last);
        in_order.extend(left.pop_front());
    }
    // Stable: they keep their turns otherwise.
    in_order.sort_by_key(|tests| !tests.iter().any(|test| LONG.contains(&&*test.file)));
    if let Some(last) = in_order.pop() {
        in_order.extend(halves(&last));
    }
    let shared = in_order.into_iter().map(|tests| Unit {
        tests,
        own_boot: false,
    });
    own.into_iter().chain(shared).collect()
}

/// The tests in two parts of whole files, or in one.
fn halves(tests: &[TestCase]) -> Vec<Vec<TestCase>> {
    let middle = &tests[tests.len() / 2];
    let at = tests.partition_point(|test| test.file < middle.file);
    let (one, other) = tests.split_at(at);
    let halves = [one, other].into_iter().filter(|half| !half.is_empty());
    halves.map(<[TestCase]>::to_vec).collect()
}

/// All units, each with the index of its kernel. The kernels take turns, so that the longest
/// units start early on each kernel.
pub(crate) fn in_turn(of_kernels: &[Vec<Unit>]) -> Vec<(usize, &Unit)> {
    let most = of_kernels.iter().map(Vec::len).max().unwrap_or(0);
    (0..most)
        .flat_map(|turn| {
            let kernels = of_kernels.iter().enumerate();
            kernels.filter_map(move |(kernel, units)| Some((kernel, units.get(turn)?)))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(name: &str, count: usize) -> Vec<TestCase> {
        (0..count)
            .map(|number| TestCase {
                file: name.to_owned(),
                name: format!("test_{number:02}"),
            })
            .collect()
    }

    #[test]
    fn files_share_boots_from_both_ends_and_none_is_split_or_forgotten() {
        let files = [
            ("attach", 20),
            ("detach", 20),
            ("hub", 20),
            ("iscsi", 20),
            ("lab", 2),
            ("mpath", 40),
        ];
        let tests: Vec<TestCase> = files
            .iter()
            .flat_map(|(name, count)| file(name, *count))
            .collect();
        let units = of(&tests);
        assert!(units.iter().all(|unit| !unit.own_boot));
        let first = |unit: &Unit| (unit.tests[0].id(), unit.tests.len());
        let firsts: Vec<(String, usize)> = units.iter().map(first).collect();
        let named = |file: &str, count| (format!("{file}::test_00"), count);
        let expected = [
            named("lab", 42),
            named("attach", 40),
            named("hub", 20),
            named("iscsi", 20),
        ];
        assert_eq!(firsts, expected);
        let mut together: Vec<TestCase> = units.into_iter().flat_map(|unit| unit.tests).collect();
        together.sort();
        assert_eq!(together, tests);
    }

    #[test]
    fn units_with_long_files_come_before_the_other_shared_ones() {
        let files = [
            file("attach", 40),
            file("nbd", 40),
            file("nbd_heal", 40),
            file("own_boot_storm", 1),
            file("udevd", 40),
        ];
        let units = of(&files.concat());
        let firsts: Vec<&str> = units.iter().map(|unit| &*unit.tests[0].file).collect();
        assert_eq!(
            firsts,
            ["own_boot_storm", "nbd_heal", "udevd", "attach", "nbd"]
        );
    }

    #[test]
    fn kernels_take_turns_until_none_has_a_unit_left() {
        let units = [of(&file("own_boot_storm", 3)), of(&file("nbd", 2))];
        let queue = in_turn(&units);
        let kernels: Vec<usize> = queue.iter().map(|(kernel, _)| *kernel).collect();
        assert_eq!(kernels, [0, 1, 0, 0]);
    }

    #[test]
    fn tests_with_boots_of_their_own_come_first_and_one_by_one() {
        let tests = [
            file("nbd", 3),
            file("own_boot_crash", 2),
            file("own_boot_storm", 1),
        ]
        .concat();
        let units = of(&tests);
        let shown: Vec<(String, usize, bool)> = units
            .iter()
            .map(|unit| (unit.tests[0].id(), unit.tests.len(), unit.own_boot))
            .collect();
        assert_eq!(
            shown,
            [
                ("own_boot_crash::test_00".to_owned(), 1, true),
                ("own_boot_crash::test_01".to_owned(), 1, true),
                ("own_boot_storm::test_00".to_owned(), 1, true),
                ("nbd::test_00".to_owned(), 3, false),
            ]
        );
    }
}
