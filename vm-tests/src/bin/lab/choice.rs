//! Chooses the kernels that a test runs on.

use vm_tests::job::TestCase;

use crate::accel::Accel;
use crate::kernel::Series;

/// Files that run on each kernel in every run, with the reason.
const ON_EACH_KERNEL: &[(&str, &str)] = &[
    ("fc_lab", "what the tests of FC take for granted of libfc"),
    ("hub", "what the sockets of uevents deliver and lose"),
    (
        "iscsi_lab",
        "what the tests of iSCSI take for granted of LIO",
    ),
    ("iscsi_netlink_port", "the kernel's port of iscsid"),
    ("iscsi_sessions", "the kernel's iSCSI netlink messages"),
    ("lab", "what the other tests take for granted of a kernel"),
    ("mpath_map", "the ioctls of device-mapper"),
    ("nbd_kernel", "the netlink messages and files of NBD"),
    (
        "nbd_kernel_links",
        "how the driver loses and takes connections",
    ),
];

/// The parts of the names of files that need udev, multipathd, open-iscsi or systemd. These files
/// run with another userland.
const ABOVE_THE_KERNEL: &[&str] = &[
    "attach", "detach", "fc_", "hub", "iscsi", "lvm", "mpath", "settle", "sg3", "systemd", "udev",
];

/// How many of the selected kernels a test runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Breadth {
    /// On one, by the seed; files of [`ON_EACH_KERNEL`] on each.
    BySeed(u64),
    /// On each.
    Each,
    /// On each. The tests that `expected-skips` lists are booted too, and the run fails when
    /// one of them does not skip.
    EachWithKnownSkips,
}

impl Breadth {
    /// How the machines are emulated. The run of each commit is the cheaper one; in the others the
    /// guest's processors run at the same moment, as those of a user's machine do.
    pub(crate) fn emulation(self) -> Accel {
        match self {
            Self::BySeed(_) => Accel::TcgOnOneThread,
            Self::Each | Self::EachWithKnownSkips => Accel::Tcg,
        }
    }
}

/// What one kernel is to run.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) booted: Vec<TestCase>,
    /// Skipped tests, with the reason from `expected-skips`.
    pub(crate) skipped: Vec<(TestCase, &'static str)>,
}

/// The choice for each of `kernels`, in their order.
pub(crate) fn choose(
    tests: &[TestCase],
    kernels: &[Series],
    breadth: Breadth,
    known_skip: impl Fn(Series, &str) -> Option<&'static str>,
) -> Vec<Choice> {
    let mut choices: Vec<Choice> = kernels.iter().map(|_| Choice::default()).collect();
    for test in tests {
        let id = test.id();
        let skips = kernels.iter().map(|series| known_skip(*series, &id));
        let skips: Vec<Option<&str>> = skips.collect();
        let only = match breadth {
            Breadth::BySeed(seed) if !runs_on_each(test) => Some(one_by_seed(&skips, &id, seed)),
            _ => None,
        };
        for (at, choice) in choices.iter_mut().enumerate() {
            // A user who selects this userland alone wants every test.
            let is_one_of_several = kernels[at] == Series::Sid && kernels.len() > 1;
            if only.is_some_and(|only| only != at)
                || (is_one_of_several && !is_above_the_kernel(test))
            {
                continue;
            }
            match skips[at] {
                Some(reason) if breadth != Breadth::EachWithKnownSkips => {
                    choice.skipped.push((test.clone(), reason));
                }
                _ => choice.booted.push(test.clone()),
            }
        }
    }
    choices
}

fn runs_on_each(test: &TestCase) -> bool {
    ON_EACH_KERNEL.iter().any(|(file, _)| *file == test.file)
}

fn is_above_the_kernel(test: &TestCase) -> bool {
    let mut parts = ABOVE_THE_KERNEL.iter();
    parts.any(|part| test.file.contains(part))
}

/// One of the kernels on which the test does not skip, or the first if it skips on each. The
/// next seed takes the next of them.
fn one_by_seed(skips: &[Option<&str>], id: &str, seed: u64) -> usize {
    let able = (0..skips.len()).filter(|at| skips[*at].is_none());
    let able: Vec<usize> = able.collect();
    let turn = hash(id).wrapping_add(seed);
    let count = u64::try_from(able.len().max(1)).unwrap_or(1);
    let turn = usize::try_from(turn % count).unwrap_or(0);
    able.get(turn).copied().unwrap_or(0)
}

/// FNV-1a and the last step of `MurmurHash3`, because the last letters of FNV reach too few
/// bits. The hash is the same with every compiler, so that a seed always means the same run.
fn hash(name: &str) -> u64 {
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let hash = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash ^ (hash >> 33)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: [Series; 2] = [Series::V6_1, Series::Newest];

    fn tests(file: &str, count: usize) -> Vec<TestCase> {
        let test = |number| TestCase {
            file: file.to_owned(),
            name: format!("test_{number}"),
        };
        (0..count).map(test).collect()
    }

    /// Lists the test of this number on 6.1.
    fn skips_on_6_1(number: usize) -> impl Fn(Series, &str) -> Option<&'static str> {
        let listed = format!("detach::test_{number}");
        move |series, id| (series == Series::V6_1 && id == listed).then_some("too old")
    }

    #[test]
    fn two_seeds_run_each_test_on_each_kernel_and_each_seed_runs_it_once() {
        let tests = tests("detach", 300);
        let choose = |seed| choose(&tests, &BOTH, Breadth::BySeed(seed), |_, _| None);
        let [one, next] = [choose(7), choose(8)];
        assert_eq!(one, choose(7));
        for at in 0..BOTH.len() {
            let together = [one[at].booted.clone(), next[at].booted.clone()].concat();
            assert_eq!(together.len(), tests.len());
            assert!(tests.iter().all(|test| together.contains(test)));
            let share = one[at].booted.len();
            assert!((100..=200).contains(&share), "{share} of {}", tests.len());
        }
    }

    #[test]
    fn a_test_that_cannot_run_on_one_kernel_runs_on_the_other_with_every_seed() {
        let tests = tests("detach", 4);
        for seed in 0..4 {
            let choices = choose(&tests, &BOTH, Breadth::BySeed(seed), skips_on_6_1(2));
            assert!(choices[1].booted.contains(&tests[2]), "{choices:?}");
            assert!(choices.iter().all(|choice| choice.skipped.is_empty()));
        }
    }

    #[test]
    fn a_test_that_can_run_on_no_kernel_is_skipped_once() {
        let tests = tests("detach", 1);
        let choices = choose(&tests, &BOTH, Breadth::BySeed(3), |_, _| Some("too old"));
        let skipped: usize = choices.iter().map(|choice| choice.skipped.len()).sum();
        assert_eq!(skipped, 1);
        assert!(choices.iter().all(|choice| choice.booted.is_empty()));
    }

    #[test]
    fn a_file_that_faces_the_kernels_interface_runs_on_each_kernel() {
        let tests = tests("nbd_kernel", 3);
        let choices = choose(&tests, &BOTH, Breadth::BySeed(1), |_, _| None);
        assert!(choices.iter().all(|choice| choice.booted == tests));
    }

    #[test]
    fn known_skips_are_not_booted_unless_they_are_to_be_checked() {
        let tests = tests("detach", 3);
        let each = choose(&tests, &BOTH, Breadth::Each, skips_on_6_1(0));
        assert_eq!(each[0].skipped, [(tests[0].clone(), "too old")]);
        assert_eq!(each[0].booted, tests[1..]);
        assert_eq!(each[1].booted, tests);
        let breadth = Breadth::EachWithKnownSkips;
        let checked = choose(&tests, &BOTH, breadth, skips_on_6_1(0));
        assert!(checked.iter().all(|choice| choice.booted == tests));
    }

    #[test]
    fn another_userland_runs_the_files_that_need_one_and_alone_it_runs_all() {
        let tests = [tests("iscsi_attach", 2), tests("nbd_kernel", 2)].concat();
        let booted = |series: &[Series]| {
            let choices = choose(&tests, series, Breadth::Each, |_, _| None);
            choices.last().unwrap().booted.clone()
        };
        assert_eq!(booted(&Series::WITH_SIDS_USERLAND), tests[..2]);
        assert_eq!(booted(&[Series::Sid]), tests);
    }

    #[test]
    fn each_file_that_runs_on_each_kernel_exists() {
        let program = include_str!("../../../tests/guest/main.rs");
        for (file, _) in ON_EACH_KERNEL {
            assert!(program.contains(&format!("\nmod {file};\n")), "{file}");
        }
    }
}
