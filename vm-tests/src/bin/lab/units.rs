//! What is booted together.

use vm_tests::job::TestCase;

/// Each test of a file named so has a boot of its own.
const OWN_BOOT: &str = "own_boot_";

/// How many tests share a boot, at least, before the next file gets another: few
/// enough that no machine is waited for while the others have nothing left to do,
/// and enough to be worth a boot, which costs about as much as three tests.
const WORTH_A_BOOT: usize = 25;

/// Tests that one machine runs, one after the other.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Unit {
    pub(crate) tests: Vec<TestCase>,
    /// It is one that has a boot of its own.
    pub(crate) own_boot: bool,
}

/// The units of `tests`, which are sorted, in the order in which they are best begun:
/// those with boots of their own are the sweeps and the storms, and the longest.
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
    let shared = shared.into_iter().map(|tests| Unit {
        tests,
        own_boot: false,
    });
    own.into_iter().chain(shared).collect()
}

/// All units, each with the place of its kernel: the kernels take turns, so that those
/// that are best begun early are begun early on each.
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
    fn files_share_boots_and_none_is_split_or_forgotten() {
        let files = [("attach", 20), ("detach", 10), ("hub", 2), ("nbd", 3)];
        let tests: Vec<TestCase> = files
            .iter()
            .flat_map(|(name, count)| file(name, *count))
            .collect();
        let units = of(&tests);
        let counts: Vec<usize> = units.iter().map(|unit| unit.tests.len()).collect();
        assert_eq!(counts, [30, 5]);
        assert!(units.iter().all(|unit| !unit.own_boot));
        let together: Vec<TestCase> = units.into_iter().flat_map(|unit| unit.tests).collect();
        assert_eq!(together, tests);
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
